r"""Convert LaTeX and Unicode text to one plain spelling, and parse the numbers and quantities in it.

Only spellings are unified. Numbers are parsed, and nothing else is computed. Treat the text as hostile: lengths are capped
first, every pass takes linear time, and numbers are capped before any arithmetic.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

MAX_NUMBER_CHARS = 64
MAX_EXPONENT = 1000

_UNICODE = {
    **dict.fromkeys("\u2212\u2013\u2010\u2011", "-"),
    **dict.fromkeys("\u00a0\u202f\u2009", r"\,"),  # printed thousands separators
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00b7\u22c5", r"\cdot "),
    "\u00d7": r"\times ",
    "\u00f7": r"\div ",
    "\u2236": ":",
    "\u066b": ".",
    "\u066c": ",",
    "\u066a": "%",
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u211d": r"\mathbb{R}",
    "√": r"\sqrt ",
    "°": r"^\circ",
    "\u2026": r"\dots ",
}
# Superscript and subscript digits and signs.
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+|[\u2080-\u208b]+")
_FIRST_LOWERED = "\u2080"
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_AMOUNT = rf"({_CURRENCY}\s?[0-9][0-9.,]*)\s?"
# Each pattern removes or unifies markup without a meaning of its own.
_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\A\s*~\s*(?=[-+0-9.$])", r"\\approx "),
        (r"\{,\}", ","),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|phantom\{[^{}]*\})", ""),
        (r"(?<!\\)\\[()\[\]]", ""),
        (_AMOUNT + r"[kK](?![A-Za-z])", r"\1 thousand"),
        (_AMOUNT + r"(?:[mM]|mn)(?![A-Za-z])", r"\1 million"),
        (_AMOUNT + r"(?:[bB]|bn)(?![A-Za-z])", r"\1 billion"),
        (rf"{_CURRENCY}(?:\s*USD)?", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<=[0-9])(?<!\\)\\[,;:](?=[0-9]{3}(?![0-9]))", ","),
        (r"\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\[ ,;:]|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\leq(?:slant)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\[lc]?dots(?![A-Za-z])|\.\.\.+", r"\\dots "),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9.]+)\s*\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?",
            r"\1(\2\\pi/180)",
        ),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})", ""),
        (r"\\degrees?(?![A-Za-z])", ""),
        (r"\\infin(?![A-Za-z])|(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\imath(?![A-Za-z])", "i"),
        (r"(?<![A-Za-z\\])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
        (r"_\s*\{\\text\{\s*(\w+)\s*\}\s*\}", r"_{\1}"),
        (r"\A\(([0-9A-Fa-f]+)\)\s*_", r"\1_"),
        (r"\*\*", "^"),
        (r"\\ast(?![A-Za-z])|\*", r"\\cdot "),
        (r"(?<=[0-9])\)?\s*(?:in\s+)?\(?base[ -]([0-9]+)\)?\s*\Z", r"_{\1}"),
    )
)
_WRAPPER = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\*?\s*"
WRAPPED = re.compile(_WRAPPER + r"\{([^{}]*)\}")
_JOINED = re.compile(r"\s*(?:(?:" + _WRAPPER + r"\{\s*,?\s*(?:and|or)\s*\})|(?<![A-Za-z\\]),?\s(?:and|or)\s)\s*")
_ROOT = re.compile(r"\\sqrt\s*(?![{\[\sA-Za-z])(\S)|\\sqrt\s+([A-Za-z0-9])")
_SHORT_SCRIPT = re.compile(r"([\^_])\s*\{\s*(\w)\s*\}(?=\s*([0-9])?)")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_DECIMAL = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s?(?:(?P<whole>[0-9]+)[ ](?=[0-9]+/))?"
    rf"(?P<top>{_DECIMAL}(?:[eE][-+]?[0-9]+)?)"
    r"(?:/(?P<bottom>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)))?"
)
_SCIENTIFIC = re.compile(
    rf"([-+]?\s?{_DECIMAL})\s*(?:\\times|\\cdot|[xX])\s*10\s*\^\s*(?:([-+]?[0-9]+)|\{{\s*([-+]?[0-9]+)\s*\}})"
)
_REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))|\(([0-9]+)\))")

# Words after a number that change its value or make it ambiguous. Any other word is taken as a unit.
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALE = re.compile(rf"\s*\b({'|'.join(_SCALES)})\b\s*", re.IGNORECASE)
_OTHER_NUMBER = re.compile(
    r"(?<![A-Za-z])(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    r"twenty|thirty|fou?rty|fifty|sixty|seventy|eighty|ninety|ones|tens|hundreds?|thousands?|[a-z]{0,6}illions?|dozens?|gross|score|"
    r"lakhs?|crores?|myriads?|googol|mill?|mille|bil|mio|mn|bn|tn|(?-i:MM)|per\s?mille?|remainder|half|halves|thirds?|quarters?|squared?d|cubed|factorial|root|sqrt|infinity|"
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,5}teen|[a-z]{3,5}tie|hundred|thousand|[a-z]{0,6}illion)ths?|double|triple|twice|"
    r"plus|minus|negative|times\s+[A-Za-z]|over|divided|multiplied|choose|mod|modulo|base|power|raised|basis|bps|binary|octal|hex|hexadecimal|"
    r"or|nor|either|maybe|perhaps|possibly|probably|approx|approximately|about|roughly|nearly|almost|around|ish|least|most|"
    r"minimum|maximum|max|vs|versus|through|until|till|below|above|am|pm|a\.m|p\.m|bce?|ad|noon|midnight|o'clock|"
    r"mil+i(?:on|ard)[a-z]*|mil+ones|mln|mrd|tausend|kilo|mega|giga|tera|thou|grand|cr|pi|tau|"
    r"jan(?:uary)?|feb(?:ruary)?|march|apr(?:il)?|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?|"
    r"north|south|east|west|northern|southern)(?![A-Za-z])",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(
    r"\b(?:and|to|than|not|if|is|are|was|were|be|even|odd|prime|when|where|for|but|with|without|such|that)\b",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?:(?:sq|cu)\.?\s)?(?:[A-Za-z]{3,}|an?(?=\s[A-Za-z]{3})|[ckmn]m|kg|mg|km/h|m/s|ft|in|oz|lb|yd|mi|hr|ml|mL|cc|Hz)(?![A-Za-z])"
    r"(?:[ .,'/-]+[A-Za-z]+){0,7}(?:\s?\^[23])?(?:\s?/\s?[A-Za-z]{1,8}(?:\s?\^[23])?)?[\s.]*"
)
_LETTER_UNIT = re.compile(r"\s+(?:sq\s)?[mshlLgCFNJWV](?:\s?\^[23])?(?:\s?/\s?[A-Za-z]{1,8}(?:\s?\^[23])?)?[\s.]*")
_PERCENT = re.compile(r"\s*(?:\\?%|(?<![A-Za-z])(?:percent|pct|per\s?cent)(?![A-Za-z]))[\s.]*\Z", re.IGNORECASE)
_AFTER_UNIT = re.compile(r"(?<=[A-Za-z])\s+(?:squared|cubed)\Z", re.IGNORECASE)
_POWER_OF_UNIT = re.compile(r"(?:[A-Za-z]{2}|[\s/][msh])\^[23]")


def plain(text: str) -> str:
    r"""Unify LaTeX and Unicode spellings, and drop currency, degrees and spacing commands.

    Text within a formula keeps its wrapper (``\text{...}``); see ``WRAPPED``.
    """
    text = _ascii(text).strip()
    while (whole := WRAPPED.fullmatch(text)) is not None:
        text = whole[1].strip()
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = _JOINED.sub(", ", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    return _SHORT_SCRIPT.sub(lambda match: match[1] + match[2] + " " * bool(match[3]), text).strip()


def _ascii(text: str) -> str:
    """Convert digits, letters and signs of other widths and scripts to ASCII or LaTeX. Other characters stay."""
    if text.isascii():
        return text
    text = _RAISED.sub(_script, text)
    return "".join(letter if letter.isascii() else _UNICODE.get(letter) or _ascii_letter(letter) for letter in text)


def _script(match: re.Match[str]) -> str:
    """Convert superscript or subscript digits and signs to LaTeX."""
    digits = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"{'^' if match[0][0] < _FIRST_LOWERED else '_'}{{{digits}}}"


def _ascii_letter(letter: str) -> str:
    if letter.isdecimal():
        return str(unicodedata.decimal(letter))
    if unicodedata.decomposition(letter).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", letter).replace("\u2044", "/")
    if "\uff01" <= letter <= "\uff5e" or "\U0001d400" <= letter <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", letter)
    return letter


def unwrap(text: str) -> str:
    """Return plain text without the wrappers around its words."""
    return re.sub(r"\s+(?=\^)", "", " ".join(WRAPPED.sub(r" \1 ", text).split())) if "\\" in text else text


# --------------------------------------------------------------------------------------------------------------- numbers
def parse_number(text: str) -> Fraction | None:
    r"""Parse ``text`` as one number, or return None: 1,234.5, -3/4, 1 1/2, 2e3, ``\$5``, 50%.

    Currency signs, thousands separators (``,`` before three digits, ``{,}``, ``\!``, ``\,``), a final ``%`` and a final dot are
    dropped. Also return None for more than ``MAX_NUMBER_CHARS`` characters or an exponent beyond +-``MAX_EXPONENT``.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = re.sub(r"\{,\}|(?<=[0-9])\\,(?=[0-9])", ",", text.replace(r"\!", "")).replace("\u2212", "-")
    text = re.sub(rf"^([-+]?)\s?{_CURRENCY}\s?|\s?{_CURRENCY}$", r"\1", text.strip("$"))
    match = _NUMBER.fullmatch(text.removesuffix("%").removesuffix("\\").strip())
    return None if match is None else _value(match)


def leading_number(text: str) -> tuple[Fraction, str] | None:
    """Return the number at the start of ``text`` and the text after it, or None if ``text`` starts with no number."""
    shown = re.match(rf"([-+\u2212]?)\s?{_CURRENCY}?\s?", text)
    assert shown is not None
    rest = text[shown.end() :]
    sign = "-" if shown[1] == "\u2212" else shown[1]
    match = _NUMBER.match(rest.replace("\u2212", "-", 1) if rest.startswith("\u2212") else rest)
    if match is None or (sign and match["sign"]):
        return None
    value = _value(match)
    end = match.end() - match[0].endswith(".")  # a final dot belongs to the following text, as in "2. Solve"
    return None if value is None else (-value if sign == "-" else value, rest[end:])


def read_number(text: str) -> Fraction | None:
    r"""Parse plain text as one number, in more notations than ``parse_number``: ``3 \times 10^5``, ``0.\overline{3}``."""
    value = parse_number(text)
    if value is not None or len(text) > MAX_NUMBER_CHARS:
        return value
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, exponent = parse_number(match[1]), int(match[2] or match[3])
        return None if mantissa is None or abs(exponent) > MAX_EXPONENT else mantissa * Fraction(10) ** exponent
    if match := _REPEATING.fullmatch(text):
        sign, whole, digits, period = match[1], match[2], match[3], match[4] or match[5] or match[6]
        nines = (10 ** len(period) - 1) * 10 ** len(digits)
        value = Fraction(int(whole + digits or 0), 10 ** len(digits)) + Fraction(int(period), nines)
        return -value if sign else value
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of ``_NUMBER``, or None if it exceeds the caps. The caps are checked first."""
    top, bottom = match["top"], match["bottom"] or "1"
    digits, _, exponent = top.lower().partition("e")
    if len(match[0]) > MAX_NUMBER_CHARS or abs(int(exponent or 0)) > MAX_EXPONENT:
        return None
    integral = digits.partition(".")[0]
    if "," in integral and not _GROUPED.fullmatch(integral):
        return None
    divisor = Fraction(Decimal(bottom))
    if divisor == 0:
        return None
    value = Fraction(int(match["whole"] or 0)) + Fraction(Decimal(top.replace(",", ""))) / divisor
    return -value if match["sign"] == "-" else value


# ------------------------------------------------------------------------------------------------------------ quantities
def without_percent(text: str) -> tuple[str, bool]:
    """Return plain text without a final percent sign or "percent", and whether it had one."""
    match = _PERCENT.search(text[-20:])
    return (text, False) if match is None else (text[: len(text) - len(match[0])].rstrip(), True)


def without_unit(text: str) -> tuple[str, int]:
    r"""Return a plain quantity without its unit, and the product of the scale words ("million", "dozen") before the unit.

    Text without a unit at its end is returned unchanged: ``12k``, ``5 squared``, ``x is even``, ``5 or so``.
    """
    words = _words_at_end(text)
    number = text[: len(text) - len(words)]
    if number.endswith("\\"):  # the letters continue a command, as in "\pi units"
        name = re.match("[A-Za-z]*", words)
        assert name is not None
        number, words = number + name[0], words[name.end() :]
    if not words.strip(" .") or not re.search(r"[0-9]|\\(?:pi|infty|sqrt)", number):
        return text, 1
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[<>=:]", number) and not re.search(r"\\begin", number):
        return text, 1  # for example 2 hours 30 minutes
    factor, unit = 1, words
    while (scale := _SCALE.match(unit)) is not None:
        factor, unit = factor * _SCALES[scale[1].lower()], " " + unit[scale.end() :]
    return (number.rstrip(), factor) if not unit.strip(" .") or is_unit(unit) else (text, 1)


def _words_at_end(text: str) -> str:
    start = len(text)
    while start:
        if text[start - 1].isalpha() or text[start - 1] in " .'/-":
            start -= 1
        elif _POWER_OF_UNIT.fullmatch(text, max(0, start - 4), start):
            start -= 2
        else:
            break
    return text[start:]


def is_unit(text: str) -> bool:
    """Return whether the words after a number are a unit that does not change the number."""
    text = _AFTER_UNIT.sub("", text.rstrip(" ."))
    if is_other_number(text) or _NO_UNIT.search(text):
        return False
    return bool(_UNIT.fullmatch(text.strip().removeprefix("-")) or _LETTER_UNIT.fullmatch(text))


def is_other_number(text: str) -> bool:
    """Return whether words after a number change its value or make it ambiguous: "hundred", "thirds", "or", "pm"."""
    return bool(_OTHER_NUMBER.search(text))
