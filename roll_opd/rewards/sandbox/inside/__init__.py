"""Code that runs inside a sandbox; imports only the standard library.

It is bound into the sandbox as package `inside`, so its imports are relative.
"""
