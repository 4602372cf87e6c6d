"""Clients of plain HTTP: with `verify=NO_TLS`, a client of httpx does not read the certificates of all authorities.

Each would read them anew, which takes 25 ms of CPU; and tests make thousands of clients.
"""

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
