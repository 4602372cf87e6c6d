"""Both services, whose methods are the same: wire in, node call, wire out."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import logging
from collections.abc import AsyncIterator
from typing import Any

from kvasir.node.node import Node
from kvasir.node.session_stream import Command, Context, serve_session
from kvasir.proto import common_pb2

log = logging.getLogger(__name__)


class NodeServicer:
    def __init__(self, node: Node[Any], description: common_pb2.NodeDescription) -> None:
        self._node = node
        self._description = description

    async def Session(self, commands: AsyncIterator[Command], context: Context[Any, Any]) -> None:
        await serve_session(self._node, commands, context)

    async def Describe(self, _: common_pb2.DescribeRequest, context: Context[Any, Any]) -> common_pb2.DescribeResponse:
        return common_pb2.DescribeResponse(node=self._description)

    async def Drain(self, request: common_pb2.DrainRequest, context: Context[Any, Any]) -> common_pb2.DrainResponse:
        log.info("told to drain; what runs longer than %g s is left to be moved", request.grace_s)
        self._node.drain()
        return common_pb2.DrainResponse(num_in_flight=len(self._node.in_flight))
