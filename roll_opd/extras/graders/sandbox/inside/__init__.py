"""Code that runs inside a sandbox; it imports only the standard library.

In the sandbox, this directory is the package `inside`, so imports are relative.
"""
