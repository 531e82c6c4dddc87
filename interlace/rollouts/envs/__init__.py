"""Interface by which sessions lease environments to episodes. Works without torch."""
