"""`python -m meshwright`, for machines where the command itself is not on the path."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
