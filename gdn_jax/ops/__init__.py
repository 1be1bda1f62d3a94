"""The public operators, one file each: signature, docstring, checks, choice of implementation, the call. No arithmetic."""
