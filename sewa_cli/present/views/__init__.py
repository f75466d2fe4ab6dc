"""One module for each kind of report, with `view(report)`; `metric` is a select by a metric."""
