"""Measures what each worker costs on this machine, for the simulator."""
