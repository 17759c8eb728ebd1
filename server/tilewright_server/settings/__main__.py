"""``python -m tilewright_server.settings``: the reference page on standard output."""

import sys

from tilewright_server.settings.reference import reference_page

sys.stdout.write(reference_page())
