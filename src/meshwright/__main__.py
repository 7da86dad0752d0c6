"""`python -m meshwright`: the command line, for machines where `meshwright` is not on the PATH."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
