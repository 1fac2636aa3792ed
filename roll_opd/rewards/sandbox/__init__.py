"""Sandbox for untrusted programs and the grading of their test cases.

`pool` keeps sandboxes ready; `process` controls a sandbox from outside, `bubblewrap` and `seccomp` isolate it, `inside`
is the code that runs in it. `cases`, `assertions` and `calls` split a row into code for the sandbox and expected values
that stay outside; `comparison` compares them, and only the exit status of a process is trusted.
"""
