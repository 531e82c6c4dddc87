"""The stages of a flow: what joins workers by channels, under the schedule's rules."""
