"""What runs inside the guest of the NVMe-oF lab: the fabric, host identities, and the cases."""
