//! The first packets on the control socket.
//!
//! A client sends one [`ClientHello`]; the control daemon checks it and hands the connection, with the hello
//! and the peer's credentials, to the server. The server answers with one [`Welcome`] that carries the
//! session's descriptors (`SCM_RIGHTS`, in the order of [`WELCOME_DESCRIPTORS`] or [`DIRECT_DESCRIPTORS`]). From then on the socket
//! carries only descriptors that belong to messages in the ring ([`DescriptorNote`]); end of file tells either side
//! that the other is gone.
//!
//! A user interface (`mps-control COMMAND`) sends [`MAGIC_UI`] or [`MAGIC_UI_3`] followed by the command line instead.

use std::fmt;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Environment variable: active-thread percentage, 0 to 100; a client's own, and the daemon's default.
pub const ACTIVE_THREAD_PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
/// Environment variable: limits of device memory, as `0=1G,1=512MB`; a client's own, and the daemon's default.
pub const PINNED_DEVICE_MEM_LIMIT: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Environment variable: client priority, 0 normal, 1 below normal; a client's own, and the daemon's default.
pub const CLIENT_PRIORITY: &str = "CUDA_MPS_CLIENT_PRIORITY";

/// Environment variable: static partition of a client, as `GPU-…/1`.
pub const SM_PARTITION: &str = "CUDA_MPS_SM_PARTITION";

/// First bytes of a [`ClientHello`].
pub const MAGIC_CLIENT: [u8; 4] = *b"MPSC";
/// First bytes of a command packet of a user interface.
pub const MAGIC_UI: [u8; 4] = *b"MPSU";
/// First bytes of a command line of interface 3, which has modules and verbs.
pub const MAGIC_UI_3: [u8; 4] = *b"MPS3";
/// First bytes of a [`Welcome`].
pub const MAGIC_WELCOME: [u8; 4] = *b"MPSW";

/// First bytes of a packet that precedes the [`Welcome`] of a client that has waited for [`WAIT_NOTICE`]; the reason
/// follows, UTF-8.
pub const MAGIC_WAIT: [u8; 4] = *b"MPSD";
/// First bytes of a packet that precedes a [`Welcome`] by which the daemon refuses a client; the reason follows, UTF-8.
pub const MAGIC_REFUSAL: [u8; 4] = *b"MPSR";
/// Longest reason in such a packet, bytes: less than a [`Welcome`].
pub const LONGEST_REASON: usize = 500;
/// How long a client waits for a server before the daemon gives it the reason.
pub const WAIT_NOTICE: Duration = Duration::from_secs(1);

/// Version of the wire format. Raised with any change to messages, ring, segment or handshake.
pub const PROTOCOL_VERSION: u32 = 8;

/// The protocol that the library of a release speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wire {
    /// [`PROTOCOL_VERSION`], which covers the changes that no declaration shows: the meaning of messages, and the rules for
    /// writing shared memory.
    pub protocol: u32,
    /// [`crate::wire::fingerprint`] of the declarations.
    pub fingerprint: u64,
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "protocol {}, {:016x}", self.protocol, self.fingerprint)
    }
}

/// Descriptors of a [`Welcome`] in proxy mode, in order.
pub const WELCOME_DESCRIPTORS: [&str; 2] = ["segment (sealed memfd)", "doorbell (eventfd)"];

/// Descriptors of a [`Welcome`] in direct mode, in order.
pub const DIRECT_DESCRIPTORS: [&str; 3] = [
    "page (sealed memfd)",
    "doorbell (eventfd)",
    "memory of the user (sealed memfd)",
];

/// Devices one server can serve.
pub const MAX_DEVICES: usize = 16;

/// Bytes of [`ClientHello::visible`]: UUIDs of [`MAX_DEVICES`] devices, with commas.
pub const VISIBLE_LEN: usize = MAX_DEVICES * 41;

/// Bytes of [`ClientHello::partition`]: a UUID, a slash, a number, and one more, which tells that a name is too long.
pub const PARTITION_LEN: usize = 56;

/// The oldest [`PROTOCOL_VERSION`] with a [`ClientHello`] of which this one is a continuation: fields are only ever added,
/// at the end.
pub const OLDEST_HELLO: u32 = 7;
/// Bytes of the hello of [`OLDEST_HELLO`].
pub const SHORTEST_HELLO: usize = 784;
/// Longest hello that is passed on, bytes.
pub const LONGEST_HELLO: usize = 4096;

/// First packet of a client. 784 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ClientHello {
    /// [`MAGIC_CLIENT`].
    pub magic: [u8; 4],
    /// [`PROTOCOL_VERSION`] of the client.
    pub protocol: u32,
    /// [`crate::wire::fingerprint`] of the client.
    pub table_hash: u64,
    /// Process id of the client in its own PID namespace; for logs only.
    pub pid: u32,
    /// Mode that the client requests: [`crate::direct::PROXY`], [`crate::direct::DIRECT`], or 0 for the server's
    /// setting.
    pub mode: u32,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` in hundredths of a percent, 0 when not set.
    pub active_thread_centipercent: u32,
    /// `CUDA_MPS_CLIENT_PRIORITY`, or -1 when not set.
    pub priority: i32,
    /// 1: NVIDIA's MPS serves the client's own contexts.
    pub nvidia_mps: u64,
    /// 1: the client's `CUDA_VISIBLE_DEVICES` is in `visible`; 0: it may see all devices.
    pub visible_listed: u32,
    /// Bytes of `visible` that are filled.
    pub visible_len: u32,
    /// 1: the client is to be refused rather than served without its limits (`MPSSHIM_REQUIRED`).
    pub required: u64,
    /// 1: the client takes packets with reasons ([`MAGIC_WAIT`], [`MAGIC_REFUSAL`]) before the welcome.
    pub notices: u64,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible: [u8; VISIBLE_LEN],
    /// Bytes of `partition` that are filled; 0: the client names no static partition.
    pub partition_len: u64,
    /// [`SM_PARTITION`].
    pub partition: [u8; PARTITION_LEN],
}

impl ClientHello {
    /// Reads the hello of a client of any release since [`OLDEST_HELLO`]: fields that a shorter one lacks are 0, and those
    /// behind the known ones do not count. `None`: it lacks fields that each has had.
    pub fn read(packet: &[u8]) -> Option<ClientHello> {
        if packet.len() < SHORTEST_HELLO {
            return None;
        }
        let mut hello = ClientHello::new_zeroed();
        let known = packet.len().min(size_of::<ClientHello>());
        hello.as_mut_bytes()[..known].copy_from_slice(&packet[..known]);
        Some(hello)
    }

    /// The wire that the client speaks.
    pub fn wire(&self) -> Wire {
        Wire {
            protocol: self.protocol,
            fingerprint: self.table_hash,
        }
    }

    /// Sets `CUDA_VISIBLE_DEVICES`. A value that is too long counts as not set.
    #[must_use]
    pub fn with_visible(mut self, list: Option<&[u8]>) -> ClientHello {
        let list = list.filter(|list| list.len() <= VISIBLE_LEN);
        let bytes = list.unwrap_or_default();
        self.visible_listed = list.is_some().into();
        self.visible_len = bytes.len() as u32;
        self.visible = [0; VISIBLE_LEN];
        self.visible[..bytes.len()].copy_from_slice(bytes);
        self
    }

    /// `CUDA_VISIBLE_DEVICES` of the client; `None`: it may see all devices, or the value is not valid.
    pub fn visible(&self) -> Option<&str> {
        let bytes = self.visible.get(..self.visible_len as usize)?;
        let list = std::str::from_utf8(bytes).ok()?;
        (self.visible_listed == 1).then_some(list)
    }

    /// Sets the static partition. A name that is too long is cut, and then names no partition that can exist.
    #[must_use]
    pub fn with_partition(mut self, name: Option<&[u8]>) -> ClientHello {
        let name = name.unwrap_or_default();
        let len = name.len().min(PARTITION_LEN);
        self.partition_len = len as u64;
        self.partition = [0; PARTITION_LEN];
        self.partition[..len].copy_from_slice(&name[..len]);
        self
    }

    /// The static partition that the client names; bytes that are no text become `?`.
    pub fn partition(&self) -> Option<String> {
        let len = usize::try_from(self.partition_len).unwrap_or(usize::MAX);
        let printable = |byte: &u8| match byte {
            0x20..=0x7e => char::from(*byte),
            _ => '?',
        };
        let name: String = self.partition[..len.min(PARTITION_LEN)]
            .iter()
            .map(printable)
            .collect();
        (!name.is_empty()).then_some(name)
    }
}

const _: () = assert!(size_of::<ClientHello>() == 784);
const _: () = assert!(size_of::<Welcome>() > MAGIC_WAIT.len() + LONGEST_REASON);

/// The server's reply to the hello. `status` is a `CUresult`; when it is not 0 there are no descriptors.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Welcome {
    /// [`MAGIC_WELCOME`].
    pub magic: [u8; 4],
    /// [`PROTOCOL_VERSION`] of the server.
    pub protocol: u32,
    /// `CUresult`: 0, or the reason for the refusal (805, 807, 808, …).
    pub status: u32,
    /// [`crate::direct::PROXY`] or [`crate::direct::DIRECT`].
    pub mode: u32,
    /// Number of the session, unique in this server's life.
    pub session: u64,
    /// Bytes of the segment, or in direct mode of the page ([`crate::direct::Page`]).
    pub segment_len: u64,
    /// First address of the host arena; the same in the server.
    pub host_arena: u64,
    /// Bytes of the host arena.
    pub host_arena_len: u64,
    /// First address of the device arena.
    pub device_arena: u64,
    /// Bytes of the device arena.
    pub device_arena_len: u64,
    /// Server's process id; 0 when the daemon refuses the client.
    pub server_pid: u32,
    /// How many of `devices` are filled.
    pub device_count: u32,
    /// `CUuuid` of the server's devices by the server's ordinal.
    pub devices: [[u8; 16]; MAX_DEVICES],
    /// Multiprocessors that the client may use of each; 0: all.
    pub multiprocessors: [u32; MAX_DEVICES],
    /// Bytes of memory that it may have of each; 0: all.
    pub memory: [u64; MAX_DEVICES],
    /// The client's share of active threads in hundredths of a percent.
    pub active_thread_centipercent: u32,
    /// The client's priority: 0 normal, 1 below normal.
    pub priority: u32,
}

/// [`DescriptorNote::token`] of a packet that belongs to no message: a memory file with the text that the client's
/// kernels wrote before the context was lost, sent before the session ends. Its first [`DescriptorNote::len`] bytes
/// belong on standard output (device `printf`), the rest on standard error (failed assertions).
pub const LAST_WORDS: u64 = u64::MAX;

/// Packet on the session's socket that carries one descriptor for the ring message of the same token.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DescriptorNote {
    /// The token named by the ring message or the answer, or [`LAST_WORDS`].
    pub token: u64,
    /// Bytes behind the descriptor.
    pub len: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_devices_is_taken_whole_or_not_at_all() {
        let hello = ClientHello::new_zeroed();
        assert_eq!(hello.visible(), None);
        let with = |list: &[u8]| hello.with_visible(Some(list));
        assert_eq!(with(b"").visible(), Some(""));
        assert_eq!(with(b"1,GPU-00").visible(), Some("1,GPU-00"));
        assert_eq!(
            with(&[b'1'; VISIBLE_LEN]).visible().map(str::len),
            Some(VISIBLE_LEN)
        );
        assert_eq!(with(&[b'1'; VISIBLE_LEN + 1]).visible(), None);
        assert_eq!(with(b"\xff").visible(), None);
        let mut hostile = with(b"1");
        hostile.visible_len = u32::MAX;
        assert_eq!(hostile.visible(), None);
    }

    #[test]
    fn a_hello_of_another_release_is_read_as_far_as_it_is_known() {
        assert_eq!(SHORTEST_HELLO, size_of::<ClientHello>());
        let mut hello = ClientHello::new_zeroed().with_partition(Some(b"GPU-00/1"));
        (hello.protocol, hello.table_hash) = (9, 77);
        let mut packet = hello.as_bytes().to_vec();
        packet.extend(b"of a later release");
        let read = ClientHello::read(&packet).expect("a hello");
        assert_eq!(read.partition().as_deref(), Some("GPU-00/1"));
        assert_eq!((read.wire().protocol, read.wire().fingerprint), (9, 77));
        assert!(ClientHello::read(&packet[..SHORTEST_HELLO - 1]).is_none());
    }

    #[test]
    fn a_partition_s_name_is_told_or_cut() {
        let hello = ClientHello::new_zeroed();
        assert_eq!(hello.partition(), None);
        let with = |name: &[u8]| hello.with_partition(Some(name)).partition();
        assert_eq!(with(b""), None);
        assert_eq!(with(b"GPU-00/1").as_deref(), Some("GPU-00/1"));
        assert_eq!(with(b"a\xff\n").as_deref(), Some("a??"));
        let longest = format!("GPU-00000000-0000-0000-0000-000000000000/{}", u32::MAX);
        assert!(longest.len() < PARTITION_LEN);
        assert_eq!(with(longest.as_bytes()), Some(longest));
        assert_eq!(with(&[b'1'; 99]), Some("1".repeat(PARTITION_LEN)));
        let mut hostile = hello.with_partition(Some(b"1"));
        hostile.partition_len = u64::MAX;
        assert_eq!(
            hostile.partition().map(|name| name.len()),
            Some(PARTITION_LEN)
        );
    }

    /// A UUID takes 40 characters and a comma.
    #[test]
    fn a_list_of_all_devices_has_room() {
        let uuid = "GPU-00000000-0000-0000-0000-000000000000";
        let list = [uuid; MAX_DEVICES].join(",");
        let hello = ClientHello::new_zeroed().with_visible(Some(list.as_bytes()));
        assert_eq!(hello.visible(), Some(list.as_str()));
        assert_eq!(VISIBLE_LEN, 656);
    }
}
