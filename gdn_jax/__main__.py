"""`python -m gdn_jax`: the same as the command `gdn-jax`."""

from gdn_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
