"""python -m bitwright.cli"""

from bitwright.cli import main

main()
