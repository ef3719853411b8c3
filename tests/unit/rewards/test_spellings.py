r"""Answers as data sets of mathematics have them, each with spellings that models write for it.

Every spelling scores 1 against its own answer and 0 against all others, by ``boxed`` and by ``math`` alike.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from rlhf_mcore.rewards.forms import canonical
from rlhf_mcore.rewards.graders import GRADERS, boxed

# The answer first, then what means the same.
ANSWERS: list[list[str]] = [
    # whole numbers
    ["2", "2.0", r"\boxed{2}", "$2$", "x = 2", r"2\text{ units}", "+2", r"\text{2}", r"\mathbf{2}", "{2}", "2."],
    ["-2", r"-2", "\u22122", "x=-2", r"$-2$", r"\frac{-4}{2}", "- 2"],
    ["0", "0.0", "-0", r"0\%", r"0^\circ"],
    [
        "45",
        "x = 45",
        r"45^\circ",
        r"45^{\circ}",
        "45°",
        "45 degrees",
        r"45\text{ degrees}",
        r"\angle A = 45^\circ",
        r"45\degree",
    ],
    [
        "18",
        r"18\text{ dollars}",
        r"\$18",
        "18 dollars",
        "€18",
        r"\$18.00",
        r"\text{\$18}",
        "18 USD",
        r"18\ \text{dollars}",
    ],
    [
        "12",
        r"12\text{ square units}",
        "12 square units",
        r"12\text{ cm}^2",
        r"12\,\text{cm}^2",
        "12 cm^2",
        r"12\mathrm{\,cm^2}",
    ],
    ["84", r"84\text{ ways}", "84 ways", r"N=84", "84.00", r"84\text{.}"],
    ["10,080", "10080", r"10{,}080", r"10,\!080", r"10\,080", r"10,080\text{ ways}"],
    ["1,234,567", "1234567", r"1{,}234{,}567", "1234567.0"],
    ["1000000", "1,000,000", r"1{,}000{,}000", r"\$1,000,000"],
    ["50\\%", "50", r"50 \%", "50%", r"50\text{ percent}", "50 percent"],
    ["16500", r"\$16,500", "16,500", r"\$16{,}500.00"],
    ["2005", "2005", "n = 2005"],
    ["5040", "5,040", r"5040"],
    ["-15", r"-15", r"\text{-15}", "-15.0"],
    ["99", r"99", r"99\text{ students}", "99 students"],
    ["360", r"360^\circ", "360 degrees"],
    ["144", "144.0"],
    ["31", r"31\text{ days}", "31 days"],
    ["7", r"7\text{ hours}", "7 hours"],
    ["60", r"60\text{ mph}", "60 mph", r"60\text{ miles per hour}"],
    # fractions and decimals
    [
        r"\frac{1}{2}",
        r"\dfrac{1}{2}",
        r"\tfrac12",
        r"\frac12",
        "1/2",
        "0.5",
        ".5",
        r"x=\frac{1}{2}",
        r"\cfrac{1}{2}",
        r"\frac{2}{4}",
    ],
    [r"-\frac{1}{2}", r"\frac{-1}{2}", "-1/2", "-0.5", r"-\dfrac12"],
    [r"\frac{3}{4}", "3/4", "0.75", r"\frac34", r"\frac{3}{4}\text{ cup}", r"\dfrac{3}{4}"],
    [r"\frac{7}{2}", "3.5", r"3\frac{1}{2}", r"3 \frac12", "7/2", "3 1/2", r"3\dfrac{1}{2}"],
    [r"\frac{137}{60}", "137/60", r"2\frac{17}{60}"],
    [r"\frac{1}{3}", "1/3", r"\tfrac13", r"\frac{1}{3}."],
    [r"\frac{11}{36}", "11/36", r"P = \frac{11}{36}"],
    [r"-\frac{35}{9}", "-35/9", r"\frac{-35}{9}"],
    [r"\frac{3}{56}", r"\dfrac{3}{56}"],
    [r"\frac{243}{625}", "243/625", r"\frac{243}{625}\text{.}"],
    [r"\frac{4}{663}", "4/663"],
    [r"\frac{1}{64}", "1/64", "0.015625"],
    ["3.14", r"3.14", "3.140"],
    ["0.42", ".42", r"0.42\text{ m}"],
    ["2.5", "5/2", r"\frac52", r"2\frac12", "2.50"],
    ["0.0000672", "0.00006720"],
    ["6.93", r"\$6.93", "6.93"],
    ["1.25", r"1\frac14", r"\frac{5}{4}", "5/4"],
    # roots and constants
    [r"\sqrt{2}", r"\sqrt2", r"\sqrt 2", "√2", r"x=\sqrt{2}"],
    [r"2\sqrt{3}", r"2\sqrt3", r"2 \sqrt{3}", r"2\,\sqrt{3}"],
    [r"-3\sqrt{5}", r"- 3\sqrt{5}", r"-3\sqrt5"],
    [r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}", r"\sqrt{3}/2", r"\frac{\sqrt3}2", r"\frac{\sqrt3}{2}"],
    [r"-\frac{\sqrt{2}}{2}", r"\frac{-\sqrt{2}}{2}", r"-\sqrt2/2"],
    [r"\sqrt[3]{4}", r"\sqrt[3]{ 4 }"],
    [r"\frac{1+\sqrt{5}}{2}", r"\dfrac{1 + \sqrt{5}}{2}", r"(1+\sqrt5)/2"],
    [r"5+2\sqrt{6}", r"5 + 2\sqrt6"],
    [r"\frac{2\sqrt{3}}{3}", r"\frac{2 \sqrt 3}{3}", r"2\sqrt{3}/3"],
    [r"\pi", "π", r"\pi\text{ units}"],
    [r"4\pi", r"4 \pi", "4π", r"4\pi\text{ cm}^3"],
    [r"\frac{\pi}{3}", r"\pi/3", r"\dfrac{\pi}{3}", r"\frac\pi3"],
    [r"\frac{3\pi}{4}", r"3\pi/4", r"\dfrac{3 \pi}{4}"],
    [r"9\pi\sqrt{2}", r"9 \pi \sqrt{2}"],
    [r"\frac{256\pi}{3}", r"256\pi/3"],
    ["e", "e"],
    ["e^2", r"e^{2}", "e ^ 2"],
    [r"\ln 2", r"\ln 2"],
    [r"\log_2 3", r"\log_{2} 3", r"\log_{2}3"],
    # powers and bases
    ["2^{10}", r"2^{10}"],
    ["3^4", "3^{4}"],
    ["2516_8", r"2516_{8}", r"2516_{ 8 }"],
    ["1101_2", r"1101_{2}", r"1101_2"],
    [r"4 \times 10^5", r"4\times 10^{5}", "4\u00d710^5", "400000", "4e5"],
    ["300000", r"3\times 10^5"],
    # algebra
    ["x", "x"],
    ["A", "(A)", r"\text{A}", r"\text{(A)}", r"\textbf{(A)}", r"\mathrm{A}"],
    ["C", r"\textbf{(C)}", "(C)"],
    ["x+1", "x + 1", r"x+1"],
    ["x-1", "x - 1", "x\u22121"],
    ["x^2+2x+1", r"x^{2} + 2x + 1", "x^2 + 2x + 1"],
    ["x^2-7x+10", "x^2 - 7x + 10", r"x^{2}-7x+10"],
    ["(x+2)(x-3)", r"(x + 2)(x - 3)", r"\left(x+2\right)\left(x-3\right)"],
    ["y=2x+3", "2x+3", "y = 2x + 3"],
    [r"y=\frac{1}{2}x-3", r"y = \frac12 x - 3", r"y=\tfrac{1}{2}x-3"],
    [r"x^2+y^2=25", "x^2 + y^2 = 25", r"x^{2}+y^{2}=25"],
    ["3x+4y=12", "3x + 4y = 12"],
    ["6r^2-4r-24", "6r^2 - 4r - 24", r"6r^{2}-4r-24"],
    [r"\frac{x+1}{x-1}", "(x+1)/(x-1)", r"\dfrac{x + 1}{x - 1}"],
    [r"\frac{1}{2x}", "1/(2x)", r"\dfrac{1}{2x}"],
    [r"\frac{x}{2}", "x/2", r"\frac x2"],
    [r"\frac{2x+3}{5}", "(2x+3)/5"],
    [r"a^2b", r"a^{2}b", "a^2 b"],
    ["n!", "n!"],
    [r"\binom{10}{3}", r"\binom{10}{3}"],
    [r"2n-1", "2n - 1"],
    [r"\frac{n(n+1)}{2}", "n(n+1)/2", r"\dfrac{n(n+1)}{2}"],
    ["5x^3", r"5x^{3}", "5 x^3"],
    ["-x", "- x"],
    ["3+4i", "3 + 4i"],
    ["-i", "- i"],
    ["2-3i", "2 - 3i", r"2 - 3 i"],
    [r"\sin x", r"\sin x"],
    [r"\tan^2 \theta", r"\tan^2\theta", r"\tan^{2} \theta"],
    # several values
    ["0,1", "0, 1", "1,0", r"0\text{ and }1", "0 and 1", r"0 \text{ or } 1"],
    ["1,-2", "-2, 1", r"1 \text{ and } -2", "-2,1"],
    ["1,2,3", "1, 2, 3", "3,2,1"],
    ["2,3,5,7", "2, 3, 5, 7"],
    [r"\frac{1}{2},\frac{1}{3}", "1/2, 1/3", r"\frac13, \frac12", "0.5, 1/3"],
    [r"\sqrt{2},-\sqrt{2}", r"-\sqrt2, \sqrt2"],
    [r"x=1, y=2", "x = 1, y = 2"],
    [r"-1 \pm \sqrt{2}", r"-1\pm\sqrt{2}", "-1±√2"],
    [r"\pm 3", r"\pm3", "±3"],
    [r"\{1,2\}", r"\{2, 1\}", r"\left\{1,2\right\}", r"\lbrace 1, 2\rbrace"],
    [r"\{-1,0,4\}", r"\left\{ -1, 0, 4 \right\}"],
    ["12,34", "12, 34", "34,12"],
    ["100, 200", "200, 100"],
    # points, intervals, sets
    ["(3,4)", "(3, 4)", r"\left(3,4\right)", r"\left( 3, 4 \right)"],
    ["(4,3)", "(4, 3)", r"\big(4,3\big)"],
    ["(-1,2)", "(-1, 2)", r"( -1 , 2 )"],
    [r"\left(\frac{1}{2},-3\right)", r"(1/2, -3)", "(0.5,-3)", r"(\tfrac12, -3)"],
    [r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"],
    [r"(0,0,5)", "(0, 0, 5)"],
    ["[1,2]", "[1, 2]", r"\left[1,2\right]", r"x \in [1,2]", r"x\in[1, 2]"],
    ["[2,5)", "[2, 5)", r"\left[2,5\right)"],
    ["(2,5]", r"\left(2, 5\right]"],
    [r"[-2,\infty)", r"\left[-2, \infty\right)", "[-2, ∞)", r"x \in [-2,\infty)"],
    [r"(-\infty,3)", r"(-\infty, 3)", r"\left(-\infty,3\right)"],
    [
        r"(-\infty,2)\cup(3,\infty)",
        r"(-\infty, 2) \cup (3, \infty)",
        r"\left(-\infty,2\right)\cup\left(3,\infty\right)",
        "(-∞,2)\u222a(3,∞)",
    ],
    [r"[0,1]\cup[2,3]", r"[0, 1] \cup [2, 3]"],
    [r"\infty", "∞"],
    [r"-\infty", "-∞", r"- \infty"],
    # relations
    ["x>5", "x > 5"],
    ["x<-1", "x < -1", "x < \u22121"],
    [r"x\ge 2", r"x \geq 2", "x≥2", "x>=2", r"x\geqslant 2"],
    [r"x\le 2", r"x \leq 2", "x≤2", "x<=2"],
    [r"1<x<2", "1 < x < 2"],
    [r"-3\le x\le 4", r"-3 \leq x \leq 4", "-3≤x≤4"],
    [r"x\ne 0", r"x \neq 0", "x≠0"],
    # matrices
    [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
    [
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix} 1 \\  2 \end{pmatrix}",
    ],
    [r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\begin{pmatrix}-1/3\\2/3\\5/3\end{pmatrix}"],
    # words
    [r"\text{Monday}", "Monday", "monday", r"\textbf{Monday}", r"\mathrm{Monday}"],
    [r"\text{even}", "even", "Even", r"\textit{even}"],
    [r"\text{odd}", "odd"],
    [r"\text{neither}", "neither", "Neither"],
    [r"\text{Evelyn}", "Evelyn"],
    [r"\text{ellipse}", "ellipse", "Ellipse"],
    [r"\text{no solution}", "no solution", r"\text{No solution}"],
    [r"\text{Yes}", "yes", "Yes", "YES"],
    [r"\text{No}", "no", "No"],
    ["QR", r"\text{QR}"],
    # letters that are not each other
    ["a", "a"],
    ["B", "(B)"],
    ["b", "b"],
    ["AB", r"\mathrm{AB}"],
    # large and precise numbers
    ["9007199254740993", "9,007,199,254,740,993"],
    ["9007199254740992", r"9{,}007{,}199{,}254{,}740{,}992"],
    ["0.1000000000000000000000000000000000001", "0.10000000000000000000000000000000000010"],
    ["0.1", "1/10", r"\frac{1}{10}", ".10"],
    ["123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890"],
    # expressions that look alike
    ["2x", "2 x"],
    ["x^2", r"x^{2}", "x²"],
    ["x_2", r"x_{2}"],
    ["2^x", r"2^{x}"],
    ["x^{10}", r"x^{10}"],
    [r"\sqrt{x}", r"\sqrt x"],
    [r"\sqrt{x+1}", r"\sqrt{x + 1}"],
    [r"\frac{1}{x}", "1/x", r"\dfrac1x"],
    ["|x|", "|x|"],
    ["7 = 11a+c", "7=11a+c", "$7 = 11a + c$"],
    ["11a+c", "11a + c"],
    ["5", "2+3 = 5", r"\frac{10}{2}", r"15/3 = 5\text{ m}"],
    ["xy", "x y"],
    ["x+y", "x + y"],
    ["10_2", r"10_{2}"],
    ["21", "21"],
    ["210", "210"],
    ["2, 10", "10, 2"],
    [r"\frac{2}{10}", "1/5", "0.2"],
    [r"\frac{21}{10}", "2.1", r"2\frac{1}{10}"],
]


def test_the_table_is_long() -> None:
    assert len(ANSWERS) >= 150


@pytest.mark.parametrize("row", ANSWERS, ids=[row[0] for row in ANSWERS])
def test_a_spelling_of_the_answer_scores_the_maximum(row: list[str]) -> None:
    for spelling in row:
        response = f"Let us see. \\[ \\boxed{{{spelling}}} \\]"
        assert boxed(response, row[0]) == 1.0, spelling
        assert GRADERS["math"](response, row[0]) == 1.0, spelling
        assert GRADERS["answer_line"](f"Let us see.\nAnswer: ${spelling}$", row[0]) == 1.0, spelling


def test_no_spelling_is_that_of_another_answer() -> None:
    spelled = {spelling: (canonical(spelling), number) for number, row in enumerate(ANSWERS) for spelling in row}
    wrong = [(a, b) for (a, (x, i)), (b, (y, j)) in combinations(spelled.items(), 2) if x == y and i != j]
    assert wrong == []
