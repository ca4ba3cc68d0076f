"""`python -m pithtrain` is `pithtrain`."""

from pithtrain.cli import main

if __name__ == "__main__":
    main()
