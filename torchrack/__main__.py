from torchrack.cli import main

main()
