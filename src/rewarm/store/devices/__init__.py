"""Devices: how bytes get between memory and a medium. One small contract (`base`), one implementation per rung."""
