//! Clients that break the rules of memory: what they name is another's, or nothing; afterwards nothing is left.

mod control_daemon;
mod scene;

use control_daemon::wait_until;
use mpsshim_proto::arena::VIRTUAL_ARENA;
use mpsshim_proto::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::memory::{
    ACCESSES_MAX, Access, AddressReserve, GetAccess, Location, MapMemory, PhysicalCreate,
    PhysicalExport, PhysicalRetain, PoolAlloc, PoolAttribute, PoolCreate, PoolFree, Properties,
    SetAccess,
};
use mpsshim_proto::message::{Object, Op, Range};
use mpsshim_tests::peer::{Peer, Status, memset};
use scene::Scene;
use std::fs::File;
use std::os::fd::AsFd;
use zerocopy::IntoBytes;

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
        let pool = |peer: &mut Peer| -> Status<u64> {
            let handle = peer.handle(Kind::MemPool);
            let body = PoolCreate {
                handle,
                max_size: 0,
                properties: Properties {
                    kind: CU_MEM_ALLOCATION_TYPE_PINNED,
                    location: Location { kind: 1, id: 0 },
                    ..Properties::default()
                },
            };
            peer.ask_as(0, Op::PoolCreate, &body, &[])?;
            Ok(handle)
        };
        let alloc = |peer: &mut Peer, pool: u64, len: u64, stream: u64| -> Status<u64> {
            let body = PoolAlloc { pool, len, stream };
            Ok(peer.ask::<_, Range>(Op::PoolAlloc, &body, &[])?.start)
        };
        let no = CUDA_ERROR_INVALID_VALUE;
        let own = pool(&mut owner).expect("a pool");
        let address = alloc(&mut owner, own, 5000, streams[0]).expect("memory");
        assert_eq!(alloc(&mut thief, own, 5000, streams[1]), Err(no));
        let pool = pool(&mut thief).expect("a pool");
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
