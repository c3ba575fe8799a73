"""
Formats
=======

What values a format has.
"""

import ao_lab

print(ao_lab.FORMATS["float8_e4m3fn"].max)
