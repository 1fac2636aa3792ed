"""Sandbox for untrusted programs, and the grading of their test cases.

- `pool` keeps sandboxes ready. `process` controls one sandbox from outside.
- `bubblewrap` and `seccomp` isolate the sandbox. `inside` is the code that runs in it.
- `response` extracts the program from a response.
- `cases` and `assertions` split a row into code for the sandbox and expected values, which stay outside.
- `comparison` compares the output and the values of the program with the expected values.

Of the data from a sandbox, only the exit status of a process is trusted.
"""
