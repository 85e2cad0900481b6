"""What models write besides plain text: reasoning and tool calls."""
