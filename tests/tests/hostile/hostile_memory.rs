//! Clients that break the rules of memory: what they name is another's, or nothing; afterwards nothing is left.

use mpsshim_api::cuda::*;
use mpsshim_proto::arena::{VIRTUAL_ARENA, is_host};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::memory::{
    ACCESSES_MAX, Access, AddressReserve, FileRegister, GetAccess, IpcOpen, IpcOpened, Location,
    MapMemory, Opaque, Peers, PhysicalCreate, PhysicalExport, PhysicalRetain, PoolAlloc,
    PoolAttribute, PoolFree, PoolImport, Properties, RangeHandle, SetAccess,
};
use mpsshim_proto::message::{Object, Op, Range};
use mpsshim_proto::shm;
use mpsshim_tests::control_daemon::wait_until;
use mpsshim_tests::peer::{Peer, Status, memset};
use mpsshim_tests::scene::Scene;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

const UNIT: u64 = 2 << 20;

fn reserve(peer: &mut Peer, len: u64) -> Status<u64> {
    let body = AddressReserve {
        len,
        ..AddressReserve::default()
    };
    Ok(peer.ask::<_, Range>(Op::AddressReserve, &body, &[])?.start)
}

fn create(peer: &mut Peer, len: u64) -> Status<u64> {
    let handle = peer.handle(Kind::Allocation);
    let body = PhysicalCreate {
        handle,
        len,
        flags: 0,
        properties: Properties {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: Location {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: 0,
            },
            ..Properties::default()
        },
    };
    peer.ask_as(0, Op::PhysicalCreate, &body, &[])?;
    Ok(handle)
}

fn map(peer: &mut Peer, handle: u64, address: u64, len: u64) -> Status {
    let body = MapMemory {
        handle,
        address,
        len,
        ..MapMemory::default()
    };
    peer.ask_as(0, Op::MapMemory, &body, &[]).map(drop)
}

fn access(peer: &mut Peer, address: u64, len: u64, flags: u32) -> Status {
    let body = SetAccess {
        address,
        len,
        count: 1,
        pad: 0,
    };
    let access = Access {
        location: Location {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        },
        flags,
        pad: 0,
    };
    peer.ask_as(0, Op::SetAccess, &body, access.as_bytes())
        .map(drop)
}

fn unmap(peer: &mut Peer, start: u64, len: u64) -> Status {
    peer.ask_as(0, Op::UnmapMemory, &Range { start, len }, &[])
        .map(drop)
}

/// What a post came to.
fn posted<T: IntoBytes + zerocopy::Immutable>(peer: &mut Peer, op: Op, body: &T) -> Status {
    peer.post(op, body, &[])?;
    // Whatever is asked next is answered after it.
    let _ = peer.mem_info();
    peer.posted_error()
}

#[test]
fn mappings_of_another_are_out_of_reach() {
    Scene::new().beside_a_worker(|scene| {
        let (mut owner, mut thief) = (scene.peer(), scene.peer());
        let stream = thief.stream().expect("a stream");
        owner.stream().expect("a stream");
        let at = reserve(&mut owner, 4 * UNIT).expect("addresses");
        let memory = create(&mut owner, UNIT).expect("memory");
        map(&mut owner, memory, at, UNIT).expect("a mapping");
        let no = Err(CUDA_ERROR_INVALID_VALUE);
        let own = create(&mut thief, UNIT).expect("memory");
        assert_eq!(map(&mut thief, own, at + UNIT, UNIT), no);
        assert_eq!(map(&mut thief, memory, at, UNIT), no);
        assert_eq!(access(&mut thief, at, UNIT, 3), no);
        assert_eq!(unmap(&mut thief, at, UNIT), no);
        let body = PhysicalRetain {
            handle: thief.handle(Kind::Allocation),
            address: at,
        };
        let retained = thief.ask_as(0, Op::PhysicalRetain, &body, &[]);
        assert_eq!(retained.map(drop), no);
        let range = Range {
            start: at,
            len: 4 * UNIT,
        };
        assert_eq!(posted(&mut thief, Op::AddressFree, &range), no);
        access(&mut owner, at, UNIT, 3).expect("access");
        assert_eq!(
            posted(&mut thief, Op::Memset, &memset(at, 1, 4, stream)),
            no
        );
        // Nor is what the owner has, where it may not be used.
        let stream = owner.stream().expect("a stream");
        assert_eq!(
            posted(&mut owner, Op::Memset, &memset(at, 1, 4, stream)),
            Ok(())
        );
        assert_eq!(
            posted(&mut owner, Op::Memset, &memset(at + UNIT - 8, 1, 4, stream)),
            no
        );
        access(&mut owner, at, UNIT, 0).expect("no access");
        assert_eq!(
            posted(&mut owner, Op::Memset, &memset(at, 1, 4, stream)),
            no
        );
        unmap(&mut owner, at, UNIT).expect("no mapping");
        assert_eq!(
            posted(&mut owner, Op::Memset, &memset(at, 1, 4, stream)),
            no
        );
        // A second handle, a mapping and a reservation are left to the server.
        map(&mut owner, memory, at + UNIT, UNIT).expect("a mapping");
        access(&mut owner, at + UNIT, UNIT, 3).expect("access");
    });
}

#[test]
fn wrong_numbers_of_virtual_memory_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.stream().expect("a stream");
        let no = CUDA_ERROR_INVALID_VALUE;
        for len in [0, 1, UNIT - 1, UNIT + 4096] {
            assert_eq!(reserve(&mut peer, len), Err(no), "{len}");
        }
        for len in [1 << 50, u64::MAX - UNIT + 1] {
            assert_eq!(reserve(&mut peer, len), Err(CUDA_ERROR_OUT_OF_MEMORY));
        }
        for alignment in [3, UNIT + 1, u64::MAX, 1 << 63] {
            let body = AddressReserve {
                len: UNIT,
                alignment,
                ..AddressReserve::default()
            };
            assert!(peer.ask_as(0, Op::AddressReserve, &body, &[]).is_err());
        }
        let at = reserve(&mut peer, UNIT).expect("addresses");
        let memory = create(&mut peer, UNIT).expect("memory");
        for (address, len) in [
            (at, 2 * UNIT),
            (at - UNIT, 2 * UNIT),
            (at, u64::MAX - UNIT + 1),
            (VIRTUAL_ARENA - UNIT, UNIT),
            (0, UNIT),
            (u64::MAX - UNIT + 1, UNIT),
        ] {
            assert_eq!(map(&mut peer, memory, address, len), Err(no), "{address:x}");
            assert_eq!(unmap(&mut peer, address, len), Err(no), "{address:x}");
            assert_eq!(access(&mut peer, address, len, 3), Err(no), "{address:x}");
        }
        for handle in [0, 1, memory + 1, memory ^ 1 << 32, u64::MAX] {
            assert_eq!(map(&mut peer, handle, at, UNIT), Err(no));
            let object = Object { object: handle };
            assert_eq!(posted(&mut peer, Op::PhysicalRelease, &object), Err(no));
            let body = PhysicalExport {
                handle,
                kind: 1,
                ..PhysicalExport::default()
            };
            assert!(peer.ask_as(7, Op::PhysicalExport, &body, &[]).is_err());
        }
        let body = GetAccess {
            address: at,
            location: Location { kind: 1, id: 99 },
        };
        assert!(peer.ask_as(0, Op::GetAccess, &body, &[]).is_err());
        // The same handle twice; the first stays.
        let body = PhysicalCreate {
            handle: memory,
            len: UNIT,
            flags: 0,
            properties: Properties {
                kind: 1,
                handle_types: 1,
                location: Location { kind: 1, id: 0 },
                ..Properties::default()
            },
        };
        assert!(peer.ask_as(0, Op::PhysicalCreate, &body, &[]).is_err());
        map(&mut peer, memory, at, UNIT).expect("a mapping");
    });
}

#[test]
fn pools_and_what_is_in_them_are_their_owner_s() {
    Scene::new().beside_a_worker(|scene| {
        let (mut owner, mut thief) = (scene.peer(), scene.peer());
        let streams = [owner.stream(), thief.stream()].map(|stream| stream.expect("a stream"));
        let alloc = |peer: &mut Peer, pool: u64, len: u64, stream: u64| -> Status<u64> {
            let body = PoolAlloc { pool, len, stream };
            Ok(peer.ask::<_, Range>(Op::PoolAlloc, &body, &[])?.start)
        };
        let no = CUDA_ERROR_INVALID_VALUE;
        let own = owner.pool().expect("a pool");
        let address = alloc(&mut owner, own, 5000, streams[0]).expect("memory");
        assert_eq!(alloc(&mut thief, own, 5000, streams[1]), Err(no));
        let pool = thief.pool().expect("a pool");
        for wrong in [0, pool + 1, pool ^ 1 << 32, u64::MAX] {
            assert_eq!(alloc(&mut thief, wrong, 5000, streams[1]), Err(no));
        }
        assert_eq!(
            alloc(&mut thief, pool, 5000, 77),
            Err(CUDA_ERROR_INVALID_HANDLE)
        );
        assert_eq!(
            alloc(&mut thief, pool, 1 << 50, streams[1]),
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        );
        for address in [address, address + 8, 0, u64::MAX] {
            let body = PoolFree {
                address,
                stream: streams[1],
            };
            assert_eq!(posted(&mut thief, Op::PoolFree, &body), Err(no));
            let body = memset(address, 1, 4, streams[1]);
            assert_eq!(posted(&mut thief, Op::Memset, &body), Err(no));
        }
        let inside = memset(address + 4984, 1, 4, streams[0]);
        assert_eq!(posted(&mut owner, Op::Memset, &inside), Ok(()));
        let beyond = memset(address + 4988, 1, 4, streams[0]);
        assert_eq!(posted(&mut owner, Op::Memset, &beyond), Err(no));
        // A pool that is gone while memory of it is not.
        let object = Object { object: own };
        assert_eq!(posted(&mut owner, Op::PoolDestroy, &object), Ok(()));
        assert_eq!(posted(&mut owner, Op::PoolDestroy, &object), Err(no));
        assert_eq!(posted(&mut owner, Op::Memset, &inside), Ok(()));
        let body = PoolAttribute {
            pool: own,
            attribute: 7,
            ..PoolAttribute::default()
        };
        for op in [Op::PoolGetAttribute, Op::PoolSetAttribute, Op::PoolTrim] {
            assert!(owner.ask_as(0, op, &body, &[]).is_err());
        }
    });
}

fn opaque(bytes: &[u8]) -> Opaque {
    Opaque::read_from_bytes(bytes).expect("64 bytes")
}

#[test]
fn memory_is_opened_by_its_handle_alone_and_outlives_its_owner() {
    Scene::new().beside_a_worker(|scene| {
        let (mut owner, mut other) = (scene.peer(), scene.peer());
        let streams = [owner.stream(), other.stream()].map(|stream| stream.expect("a stream"));
        let grant = owner.memory(4 << 20).expect("memory");
        let start = grant.start + 4096;
        let share = |peer: &mut Peer, start: u64, len: u64| {
            let body = Range { start, len };
            peer.ask::<_, Opaque>(Op::IpcShare, &body, &[])
        };
        let no = CUDA_ERROR_INVALID_VALUE;
        for (start, len) in [
            (start, 0),
            (start, 4 << 20),
            (start, u64::MAX),
            (grant.start - 1, 1),
            (grant.start + grant.len, 1),
            (0, 4096),
        ] {
            assert_eq!(share(&mut owner, start, len), Err(no), "{start:x} {len:x}");
        }
        assert_eq!(share(&mut other, start, 8192), Err(no));
        let handle = share(&mut owner, start, 8192).expect("a handle");
        assert_eq!(share(&mut owner, start, 8192), Ok(handle));
        let open = |peer: &mut Peer, handle: Opaque| {
            let body = IpcOpen {
                handle,
                ..IpcOpen::default()
            };
            peer.ask::<_, IpcOpened>(Op::IpcOpen, &body, &[])
                .map(|opened| (opened.start, opened.len))
        };
        assert_eq!(open(&mut owner, handle), Err(CUDA_ERROR_INVALID_CONTEXT));
        for bit in [0, 127, 128, 383, 384, 511] {
            let mut wrong = [0; 64];
            wrong.copy_from_slice(handle.as_bytes());
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&mut other, opaque(&wrong)), Err(no), "bit {bit}");
        }
        let touch = |peer: &mut Peer, at: u64, stream: u64| {
            posted(peer, Op::Memset, &memset(at, 7, 4, stream))
        };
        assert_eq!(touch(&mut other, start, streams[1]), Err(no));
        assert_eq!(open(&mut other, handle), Ok((start, 8192)));
        assert_eq!(open(&mut other, handle), Ok((start, 8192)));
        assert_eq!(touch(&mut other, start, streams[1]), Ok(()));
        assert_eq!(touch(&mut other, start + 8192 - 16, streams[1]), Ok(()));
        for beside in [start - 16, start + 8192 - 8, start + 8192, grant.start] {
            assert_eq!(touch(&mut other, beside, streams[1]), Err(no));
        }
        // What one has open is not one's own to give.
        assert_eq!(share(&mut other, start, 8192), Err(no));
        assert_eq!(posted(&mut other, Op::MemRelease, &grant), Err(no));
        let object = |object| Object { object };
        assert_eq!(posted(&mut other, Op::IpcClose, &object(start)), Ok(()));
        assert_eq!(touch(&mut other, start, streams[1]), Ok(()));
        // The owner frees it: nobody else opens it, but who has it keeps it.
        assert_eq!(posted(&mut owner, Op::IpcForget, &object(start)), Ok(()));
        assert_eq!(open(&mut other, handle), Err(no));
        let handle = share(&mut owner, start, 8192).expect("a handle");
        drop(owner);
        let mut third = scene.peer();
        wait_until("the owner has gone", || {
            open(&mut third, handle) == Err(CUDA_ERROR_INVALID_VALUE)
        });
        drop(third);
        assert_eq!(touch(&mut other, start, streams[1]), Ok(()));
        assert_eq!(posted(&mut other, Op::IpcClose, &object(start)), Ok(()));
        assert_eq!(posted(&mut other, Op::IpcClose, &object(start)), Err(no));
        assert_eq!(touch(&mut other, start, streams[1]), Err(no));
        // Left open: the server closes it.
        let mut owner = scene.peer();
        owner.stream().expect("a stream");
        let start = owner.memory(2 << 20).expect("memory").start;
        let handle = share(&mut owner, start, 4096).expect("a handle");
        assert_eq!(open(&mut other, handle), Ok((start, 4096)));
    });
}

/// A file in memory that can be cut short.
fn in_memory(len: u64) -> File {
    let path = format!("/dev/shm/mpsshim-test-{}", std::process::id());
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).open(&path);
    std::fs::remove_file(path).expect("remove");
    let file = file.expect("a file");
    file.set_len(len).expect("its length");
    file
}

#[test]
fn files_that_are_not_as_they_should_be_are_not_registered() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let stream = peer.stream().expect("a stream");
        let memory = in_memory(8192);
        let null = File::open("/dev/null").expect("a file");
        let program = File::open("/proc/self/exe").expect("a file");
        let mut token = 1;
        let mut register = |peer: &mut Peer, fd: BorrowedFd<'_>, offset, len, address| {
            token += 1;
            peer.send_descriptor(token, fd).expect("send");
            let body = FileRegister {
                offset,
                len,
                address,
                flags: 0,
                device: 0,
            };
            let payload = peer.ask_as(token, Op::FileRegister, &body, &[])?;
            Ok(Range::read_from_bytes(&payload).expect("a range").start)
        };
        let no = Err(CUDA_ERROR_INVALID_VALUE);
        for (offset, len, address) in [
            (0, 0, 0),
            (0, 12288, 0),
            (4096, 8192, 0),
            (8192, 4096, 0),
            (1, 4096, 0),
            (0, 4097, 0),
            (0, 4096, 1),
            (u64::MAX - 4095, 8192, 0),
            (0, u64::MAX - 4095, 0),
        ] {
            let status = register(&mut peer, memory.as_fd(), offset, len, address);
            assert_eq!(status, no, "{offset:x} {len:x} {address:x}");
        }
        assert_eq!(register(&mut peer, null.as_fd(), 0, 4096, 0), no);
        assert_eq!(register(&mut peer, program.as_fd(), 0, 4096, 0), no);
        // Wishes that cannot be: what the server has mapped stays as it is.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", scene.server())).expect("maps");
        // The server holds addresses for registrations by mappings without access.
        let taken: Vec<u64> = maps
            .lines()
            .filter(|line| !line.contains(" ---p "))
            .filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok())
            .filter(|at| !is_host(*at))
            .collect();
        let mut kept = Vec::new();
        for wish in taken.into_iter().chain([4096, 1 << 46, u64::MAX - 4095]) {
            let at = register(&mut peer, memory.as_fd(), 0, 8192, wish).expect("registered");
            assert_ne!(at, wish);
            kept.push(at);
            if kept.len() > 40 {
                break;
            }
        }
        let at = kept[0];
        let inside = memset(at + 8176, 1, 4, stream);
        assert_eq!(posted(&mut peer, Op::Memset, &inside), Ok(()));
        let beyond = memset(at + 8180, 1, 4, stream);
        assert_eq!(
            posted(&mut peer, Op::Memset, &beyond),
            Err(CUDA_ERROR_INVALID_VALUE)
        );
        for at in kept.drain(..20) {
            let object = Object { object: at };
            assert_eq!(posted(&mut peer, Op::FileUnregister, &object), Ok(()));
            assert_eq!(
                posted(&mut peer, Op::FileUnregister, &object),
                Err(CUDA_ERROR_INVALID_VALUE)
            );
        }
        // Cut short under the registrations that are left; only the device looks at them.
        memory.set_len(0).expect("truncate");
    });
}

#[test]
fn peers_and_ranges_of_nobody_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let (mut peer, mut other) = (scene.peer(), scene.peer());
        peer.stream().expect("a stream");
        other.stream().expect("a stream");
        let no = Err(CUDA_ERROR_INVALID_VALUE);
        let peers = |peer: &mut Peer, owner, user| {
            let body = Peers {
                owner,
                user,
                enable: 1,
                pad: 0,
            };
            peer.ask_as(0, Op::PeerAccess, &body, &[]).map(drop)
        };
        let none = Err(CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(peers(&mut peer, 0, 1), none);
        assert_eq!(peers(&mut peer, u32::MAX, 0), none);
        let itself = Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        assert_eq!(peers(&mut peer, 0, 0), itself);
        let memory = other.memory(2 << 20).expect("memory").start;
        for (address, len) in [(memory, 4096), (0, 4096), (u64::MAX - 4095, 8192)] {
            let body = RangeHandle {
                address,
                len,
                kind: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                ..RangeHandle::default()
            };
            assert_eq!(peer.ask_as(0, Op::RangeHandle, &body, &[]).map(drop), no);
        }
        let null = File::open("/dev/null").expect("a file");
        peer.send_descriptor(11, null.as_fd()).expect("send");
        let body = PoolImport {
            handle: peer.handle(Kind::MemPool),
            kind: 1,
            ..PoolImport::default()
        };
        assert_eq!(peer.ask_as(11, Op::PoolImport, &body, &[]).map(drop), no);
    });
}

#[test]
fn what_is_no_memory_is_not_imported() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.stream().expect("a stream");
        for path in ["/dev/null", "/proc/self/exe", "/proc/self/maps", "/"] {
            let file = File::open(path).expect("a file");
            let body = Object {
                object: peer.handle(Kind::Allocation),
            };
            peer.send_descriptor(5, file.as_fd()).expect("send");
            let imported = peer.ask_as(5, Op::PhysicalImport, &body, &[]);
            assert_eq!(imported, Err(CUDA_ERROR_UNKNOWN), "{path}");
        }
    });
}

#[test]
fn messages_of_memory_that_are_none_end_the_session() {
    Scene::new().beside_a_worker(|scene| {
        let ends = |breach: &dyn Fn(&mut Peer) -> Status, reason: &str| {
            let mut peer = scene.peer();
            let _ = breach(&mut peer);
            assert_eq!(peer.await_end(), Ok(CUDA_ERROR_MPS_RPC_FAILURE), "{reason}");
            wait_until(reason, || scene.place.log("server.log").contains(reason));
        };
        ends(
            &|peer| {
                let body = SetAccess {
                    count: ACCESSES_MAX as u32 + 1,
                    ..SetAccess::default()
                };
                let behind = vec![0; (ACCESSES_MAX + 1) * size_of::<Access>()];
                peer.ask_as(0, Op::SetAccess, &body, &behind).map(drop)
            },
            "65 accesses",
        );
        ends(
            &|peer| {
                let body = SetAccess {
                    count: 3,
                    ..SetAccess::default()
                };
                peer.ask_as(0, Op::SetAccess, &body, &[0; 40]).map(drop)
            },
            "3 accesses",
        );
        ends(
            &|peer| {
                peer.ask_as(9, Op::PhysicalImport, &Object::default(), &[])
                    .map(drop)
            },
            "no descriptor for token 9",
        );
    });
}

fn limit(peer: &mut Peer, bytes: u64) {
    let body = LimitMemory {
        device: 0,
        pad: 0,
        bytes,
    };
    peer.post(Op::LimitMemory, &body, &[]).expect("a limit");
}

#[test]
fn what_does_not_fit_a_limit_with_what_it_is_rounded_up_to_is_not_lost() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        limit(&mut peer, 1 << 20);
        for _ in 0..100 {
            assert_eq!(peer.memory(1), Err(CUDA_ERROR_OUT_OF_MEMORY));
        }
        let free = peer.mem_info().expect("memory").free;
        assert_eq!(free, 1 << 20, "nothing is counted");
    });
}

/// The descriptor of an allocation.
fn export(peer: &mut Peer, handle: u64) -> OwnedFd {
    let body = PhysicalExport {
        handle,
        kind: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ..PhysicalExport::default()
    };
    peer.ask_as(7, Op::PhysicalExport, &body, &[])
        .expect("exported");
    let mut note = DescriptorNote { token: 0, len: 0 };
    let came = shm::recv_packet(peer.socket.as_fd(), note.as_mut_bytes(), true);
    let (_, descriptors) = came.expect("a packet");
    descriptors.into_iter().next().expect("a descriptor")
}

fn import(peer: &mut Peer, descriptor: &OwnedFd) -> Status<u64> {
    let object = peer.handle(Kind::Allocation);
    peer.send_descriptor(8, descriptor.as_fd()).expect("sent");
    peer.ask_as(8, Op::PhysicalImport, &Object { object }, &[])?;
    Ok(object)
}

#[test]
fn memory_that_descriptors_hold_is_within_the_limit() {
    Scene::new().beside_a_worker(|scene| {
        let (mut owner, mut other) = (scene.peer(), scene.peer());
        limit(&mut owner, 3 * UNIT);
        limit(&mut other, 2 * UNIT);
        let mut held = Vec::new();
        for _ in 0..3 {
            let memory = create(&mut owner, UNIT).expect("memory");
            held.push(export(&mut owner, memory));
            let release = Object { object: memory };
            assert_eq!(posted(&mut owner, Op::PhysicalRelease, &release), Ok(()));
        }
        // It is still there, in the descriptors.
        assert_eq!(create(&mut owner, UNIT), Err(CUDA_ERROR_OUT_OF_MEMORY));
        let at = reserve(&mut other, 3 * UNIT).expect("addresses");
        let mut come = Vec::new();
        for descriptor in &held {
            let handle = import(&mut other, descriptor).expect("a handle");
            let address = at + come.len() as u64 * UNIT;
            come.push(map(&mut other, handle, address, UNIT));
        }
        assert_eq!(come, [Ok(()), Ok(()), Err(CUDA_ERROR_OUT_OF_MEMORY)]);
        unmap(&mut other, at, UNIT).expect("unmapped");
    });
}

#[test]
fn who_has_shared_memory_when_its_owner_ends_pays_for_it() {
    Scene::new().beside_a_worker(|scene| {
        let mut other = scene.peer();
        limit(&mut other, 3 * UNIT);
        for left in [UNIT, 0] {
            let mut owner = scene.peer();
            let grant = owner.memory(2 * UNIT).expect("memory");
            let handle: Opaque = owner.ask(Op::IpcShare, &grant, &[]).expect("a handle");
            let before = other.mem_info().expect("memory").free;
            let body = IpcOpen {
                handle,
                ..IpcOpen::default()
            };
            other
                .ask::<_, IpcOpened>(Op::IpcOpen, &body, &[])
                .expect("open");
            let now = other.mem_info().expect("memory").free;
            assert_eq!(now, before, "its owner pays");
            drop(owner);
            wait_until("it pays itself", || {
                other.mem_info().expect("memory").free == left
            });
        }
        // It has more than it may, and gets no more.
        let mut owner = scene.peer();
        let grant = owner.memory(UNIT).expect("memory");
        let handle: Opaque = owner.ask(Op::IpcShare, &grant, &[]).expect("a handle");
        let body = IpcOpen {
            handle,
            ..IpcOpen::default()
        };
        let refused = other.ask::<_, IpcOpened>(Op::IpcOpen, &body, &[]);
        assert_eq!(refused.map(drop), Err(CUDA_ERROR_OUT_OF_MEMORY));
    });
}

#[test]
fn pools_are_imported_by_descriptors_alone() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let file = mpsshim_tests::peer::memory_file(&[0; 4096]).expect("a file");
        for kind in [0, 2, 4, CU_MEM_HANDLE_TYPE_FABRIC, u32::MAX] {
            let body = PoolImport {
                handle: peer.handle(Kind::MemPool),
                kind,
                ..PoolImport::default()
            };
            peer.send_descriptor(9, file.as_fd()).expect("sent");
            // The driver would take the descriptor's number for the address of something.
            let imported = peer.ask_as(9, Op::PoolImport, &body, &[]).map(drop);
            assert_eq!(imported, Err(CUDA_ERROR_INVALID_VALUE), "{kind}");
        }
    });
}
