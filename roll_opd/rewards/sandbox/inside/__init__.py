"""What runs inside a sandbox: nothing but the standard library, and no other room of this project.

It is bound into the sandbox as the package `inside`, and imports itself relatively for that reason.
"""
