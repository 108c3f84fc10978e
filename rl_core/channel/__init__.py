"""Keyed FIFO queues between processes. `channel` has the public class `Channel`, `core` the rules."""

from rl_core.channel.channel import Channel
from rl_core.channel.handle import AsyncHandle
from rl_core.channel.model import Delivery
from rl_core.messages.channel import ChannelStats, KeyStats

__all__ = ["AsyncHandle", "Channel", "ChannelStats", "Delivery", "KeyStats"]
