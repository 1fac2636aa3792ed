"""Runs programs that nobody has read, and tells what they did.

`pool` keeps sandboxes ready; `process` is one of them seen from outside, `bubblewrap` and `seccomp` its walls, `inside`
what runs behind them. `cases`, `assertions` and `calls` turn a row into what is asked inside and what is expected
outside; `judge` compares, and believes nothing of what comes out but how a process ended.
"""
