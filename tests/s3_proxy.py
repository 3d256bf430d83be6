"""TCP proxy: `python s3_proxy.py PORT TARGET_PORT`, both on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def _proxy(port: int, target: int) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(2**16):
                writer.write(content)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_proxy(int(sys.argv[1]), int(sys.argv[2])))
