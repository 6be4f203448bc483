//! What a session holds of each memory. Every path that allocates goes through [`Account::charge`], so that a limit
//! has one place to stand.

use mpsshim_proto::cuda::CUresult;
use mpsshim_proto::handshake::MAX_DEVICES;

/// Whose memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// A device's, by the server's ordinal.
    Device(usize),
    /// Pinned memory of the host.
    Host,
}

/// Bytes held.
#[derive(Debug, Default)]
pub struct Account {
    devices: [u64; MAX_DEVICES],
    host: u64,
}

impl Account {
    fn of(&mut self, memory: Memory) -> &mut u64 {
        match memory {
            Memory::Device(ordinal) => &mut self.devices[ordinal],
            Memory::Host => &mut self.host,
        }
    }

    /// Counts memory that is about to be allocated; what comes of it then is given back with [`Account::credit`]
    /// if the allocation fails, or when it is freed.
    ///
    /// # Errors
    /// None so far: there are no limits yet.
    pub fn charge(&mut self, memory: Memory, bytes: u64) -> Result<(), CUresult> {
        let held = self.of(memory);
        *held = held.saturating_add(bytes);
        Ok(())
    }

    /// Counts memory that was freed.
    pub fn credit(&mut self, memory: Memory, bytes: u64) {
        let held = self.of(memory);
        debug_assert!(*held >= bytes, "more was freed than allocated");
        *held = held.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_memory_is_counted_by_itself() {
        let mut account = Account::default();
        account.charge(Memory::Device(1), 100).unwrap();
        account.charge(Memory::Host, 7).unwrap();
        account.charge(Memory::Device(1), 50).unwrap();
        account.credit(Memory::Device(1), 100);
        assert_eq!(
            (account.devices[0], account.devices[1], account.host),
            (0, 50, 7)
        );
    }
}
