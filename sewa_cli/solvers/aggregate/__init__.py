"""The default: moving averages weighed by the data, then pulled to what the data want.

    1  Every checkpoint is read once. A ladder of moving averages grows on the way, from the newest
       checkpoint alone to the mean of all, and each is run on the selection data.
    2  Their mean is the prior π: a rung's share is exp(−z²), z how many standard errors its loss is
       behind the best one's. A run that still moves gets a short average, one that has settled a
       long one; where the rows cannot tell, some of each.
    3  The model is linearised at π (`linear.build`, one more read), and weights are learned under
       a pull towards π, strong to weak (`linear.pull`).
    4  All of that is cross-validated, π included, and the answer is the mean of the path's weights
       with shares exp(−4z). An average of averages is an average.
    5  Nested folds say what loss to expect on new rows: each row is scored by weights that were
       weighed, pulled and shared out without it.

solver    the checkpoints: read, run, linearised, and what they give looked at once more
estimate  the folds: shares, path and nested cross-validation, in output space alone
"""
