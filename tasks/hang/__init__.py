"""When is it a hang, and who did it. Pure: no clock, no IO, no Prefect, no Ray."""
