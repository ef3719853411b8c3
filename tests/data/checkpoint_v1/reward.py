def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
