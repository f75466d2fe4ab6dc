"""One file, one command: from a config and a task to a report. Nothing here prints."""
