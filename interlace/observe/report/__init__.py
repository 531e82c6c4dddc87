"""`report.html`: results of one or several runs in one file that needs no network."""
