"""What changed since the step before, beside the steps on a remote: who follows pulls only that."""

RUN = "org/run"
STEPS = 6
