//! Address ranges that mean the same in every client and in the server.
//!
//! Pinned host memory is mapped in the **host arena** at one address in both processes, so that the pointer a program
//! gets from `cuMemHostAlloc` is valid on its CPU and on the device. Device memory lies in the **device arena**, which
//! clients reserve too, so that no host pointer of a client can be mistaken for a device pointer. The end of each device's
//! part is for managed memory: there the client maps pages of its own at the addresses of the device memory. Ranges that
//! programs reserve themselves (`cuMemAddressReserve`) lie in the **virtual arena**.
//!
//! The ranges keep clear of where Linux puts programs, libraries and stacks (0x55…, 0x7f…), of the shadow
//! memory of the sanitizers, and of where CUDA's own allocations land.

/// First address of the host arena.
pub const HOST_ARENA: u64 = 0x2a00_0000_0000;
/// Bytes of the host arena.
pub const HOST_ARENA_LEN: u64 = 1 << 40;
/// First address of the device arena.
pub const DEVICE_ARENA: u64 = 0x2c00_0000_0000;
/// Bytes of the device arena that belong to one device.
pub const DEVICE_ARENA_STRIDE: u64 = 1 << 40;
/// Bytes of the device arena.
pub const DEVICE_ARENA_LEN: u64 = DEVICE_ARENA_STRIDE * crate::handshake::MAX_DEVICES as u64;

/// Offset of the first address for managed memory in the part of a device.
pub const MANAGED_OFFSET: u64 = DEVICE_ARENA_STRIDE / 4 * 3;

/// First address of the virtual arena. It is apart from the device arena because programs reserve far more than
/// they map: PyTorch's expandable segments reserve nine eighths of the device's memory each.
pub const VIRTUAL_ARENA: u64 = 0x4000_0000_0000;
/// Bytes of the virtual arena.
pub const VIRTUAL_ARENA_LEN: u64 = 16 << 40;
/// Reservations, physical memory and mappings are multiples of this many bytes, regardless of the driver's granularity.
pub const VIRTUAL_UNIT: u64 = 2 << 20;

/// Whether an address is device memory of a session (on whatever device).
pub const fn is_device(address: u64) -> bool {
    address >= DEVICE_ARENA && address < DEVICE_ARENA + DEVICE_ARENA_LEN
}

/// Whether an address is for managed memory that has its home on a device.
pub const fn is_managed(address: u64) -> bool {
    is_device(address) && (address - DEVICE_ARENA) % DEVICE_ARENA_STRIDE >= MANAGED_OFFSET
}

/// Whether an address is in the host arena.
pub const fn is_host(address: u64) -> bool {
    address >= HOST_ARENA && address < HOST_ARENA + HOST_ARENA_LEN
}

/// Whether an address is in the virtual arena.
pub const fn is_virtual(address: u64) -> bool {
    address >= VIRTUAL_ARENA && address < VIRTUAL_ARENA + VIRTUAL_ARENA_LEN
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;
    /// Host, device and virtual arena: first address and bytes.
    const ARENAS: [(u64, u64); 3] = [
        (0x2a00_0000_0000, TIB),
        (0x2c00_0000_0000, 16 * TIB),
        (0x4000_0000_0000, 16 * TIB),
    ];

    fn arenas_of(address: u64) -> [bool; 3] {
        [is_host(address), is_device(address), is_virtual(address)]
    }

    #[test]
    fn an_address_belongs_to_the_one_arena_it_lies_in() {
        for (arena, (first, len)) in ARENAS.into_iter().enumerate() {
            for address in [first, first + len / 2, first + len - 1] {
                let only = [0, 1, 2].map(|other| other == arena);
                assert_eq!(arenas_of(address), only, "{address:#x}");
            }
            for address in [first - 1, first + len] {
                assert_eq!(arenas_of(address), [false; 3], "{address:#x}");
            }
        }
    }

    #[test]
    fn programs_libraries_and_stacks_are_in_no_arena() {
        for address in [
            0,
            1,
            0x40_0000,
            0x5555_5555_4000,
            0x7fff_ffff_f000,
            u64::MAX,
        ] {
            assert_eq!(arenas_of(address), [false; 3], "{address:#x}");
        }
    }

    #[test]
    fn managed_memory_is_at_the_end_of_each_devices_part() {
        for device in [DEVICE_ARENA, DEVICE_ARENA + 15 * TIB] {
            for (at, managed) in [
                (0, false),
                (TIB / 4 * 3 - 1, false),
                (TIB / 4 * 3, true),
                (TIB - 1, true),
            ] {
                assert_eq!(is_managed(device + at), managed, "{at:#x}");
            }
        }
        assert!(!is_managed(DEVICE_ARENA + 16 * TIB));
        assert!(!is_managed(HOST_ARENA));
    }

    #[test]
    fn the_device_arena_has_as_many_bytes_for_each_device() {
        assert_eq!(DEVICE_ARENA_STRIDE, TIB);
        let of_all = DEVICE_ARENA_STRIDE * crate::handshake::MAX_DEVICES as u64;
        assert_eq!(DEVICE_ARENA_LEN, of_all);
    }
}
