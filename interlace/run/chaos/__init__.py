"""Faults in the processes of a run, and the certificate of a run that went through them."""
