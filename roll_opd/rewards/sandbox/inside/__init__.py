"""Code that runs inside a sandbox; imports only the standard library.

The sandbox has this directory as the package `inside`, so imports are relative.
"""
