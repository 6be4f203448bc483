//! Green contexts, peers, device-wide settings.
