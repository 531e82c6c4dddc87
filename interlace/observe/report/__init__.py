"""`report.html`: what a run, or several, came to; one file that needs no network."""
