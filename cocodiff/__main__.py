from cocodiff.cli.main import program

program()
