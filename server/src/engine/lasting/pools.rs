//! Memory pools whose memory the server divides: their settings and their memory. The allocations are in a table
//! ([`crate::engine::base::block_table`]).

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::gpu::pool_memory::Chunk;
use crate::engine::images::ImageStore;
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::objects::pools::Settings;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Handle;
use serde::{Deserialize, Serialize};

/// State of a record of a pool; the key is its handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolState {
    /// The server's ordinal of the device.
    pub device: u32,
    /// `CUmemAllocationType`.
    pub kind: u32,
    /// `CUmemPoolProps::maxSize`.
    pub max_size: u64,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    pub threshold: u64,
    /// `CU_MEMPOOL_ATTR_REUSE_*`, in the order of their numbers from 1.
    pub reuse: [u64; 3],
    /// Access of other devices: for each location its kind, its id, and the flags.
    pub accesses: Vec<(u32, i32, u32)>,
}

/// A memory pool.
pub struct Pool;

impl Lasting for Pool {
    const KIND: Kind = Kind::Pool;
    type State = PoolState;

    fn make(
        record: &Record,
        state: PoolState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let made = make(making.shared, session, record.key, &state);
        made.map_err(failed("a memory pool", record))
    }
}

fn make(
    shared: &Shared,
    session: &mut Session,
    handle: u64,
    state: &PoolState,
) -> Result<(), CUresult> {
    let gpu = &shared.gpu;
    let device = gpu.device(state.device)?;
    let properties = CUmemPoolProps {
        kind: state.kind,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: device.raw,
        },
        max_size: state.max_size as usize,
        ..CUmemPoolProps::default()
    };
    let pools = &mut session.objects.pools;
    let place = (handle, device.ordinal);
    pools.create(gpu, place, &session.account, &properties)?;
    let pool = pools.pools.get_mut(handle)?;
    pool.threshold = state.threshold;
    let settings = pool.settings.as_mut().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    settings.reuse = state.reuse;
    let driver = &gpu.driver.memory;
    for (attribute, mut value) in (1..).zip(state.reuse) {
        if value != Settings::REUSE {
            driver.pool_set_attribute(pool.raw, attribute, &mut value)?;
        }
    }
    let highest = (session.shared.description.blocks()).marks(Handle(handle).index() as usize);
    if let Some(memory) = pools.divided_mut(handle) {
        memory.raise_highest(highest);
    }
    let access = |(kind, id, flags): &(u32, i32, u32)| CUmemAccessDesc {
        location: CUmemLocation {
            kind: *kind,
            id: *id,
        },
        flags: *flags,
    };
    let accesses: Vec<CUmemAccessDesc> = state.accesses.iter().map(access).collect();
    match accesses.is_empty() {
        true => Ok(()),
        false => pools.set_access(gpu, handle, &accesses),
    }
}

/// Device memory that the server has divided for a pool; the keeper holds its descriptor.
pub struct PoolMemory;

impl Lasting for PoolMemory {
    const KIND: Kind = Kind::PoolMemory;
    /// Bytes, the server's ordinal of the device, and the handle of the pool, which may have been destroyed.
    type State = (u64, u32, u64);

    fn make(
        record: &Record,
        (len, device, pool): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let memory = making.take_of(keeper::Kind::Memory, record)?;
        let gpu = &making.shared.gpu;
        let range = (record.key, len);
        let adopt = || -> Result<(), CUresult> {
            let chunk = gpu.adopt_chunk(&session.account, device, range, memory)?;
            let pools = &mut session.objects.pools;
            if let Some(memory) = pools.divided(pool) {
                gpu.set_chunk_access(&chunk, &memory.accesses)?;
            }
            pools.adopt(pool, chunk, &session.shared.description)
        };
        adopt().map_err(failed("memory of a pool", record))
    }
}

/// Describes a pool whose memory the server divides, with its present settings.
pub fn describe_pool(session: &mut Session, handle: u64) {
    let pools = &session.objects.pools;
    let (Ok(pool), Some(memory)) = (pools.pools.get(handle), pools.divided(handle)) else {
        return;
    };
    let Some(settings) = &pool.settings else {
        return;
    };
    let each = memory
        .accesses
        .iter()
        .map(|access| (access.location.kind, access.location.id, access.flags));
    let state = PoolState {
        device: pool.device.into(),
        kind: settings.kind,
        max_size: settings.max_size,
        threshold: pool.threshold,
        reuse: settings.reuse,
        accesses: each.collect(),
    };
    describe::<Pool>(session, handle, &state);
}

/// Invalidates the record of a destroyed pool.
pub fn describe_pool_end(session: &mut Session, handle: u64) {
    if session.lasting.kept {
        session.write_down(Record::ending(Kind::Ends, 0, handle));
    }
}

/// Passes new memory of a pool to the keeper and describes it. Binds the session if the keeper does not hold it.
pub fn describe_chunk(session: &mut Session, images: &ImageStore, chunk: &Chunk, pool: u64) {
    if !session.lasting.kept {
        return;
    }
    if !images.gpu.keep_chunk(chunk, &session.shared.kept) {
        session.lasting.unkept_memory = true;
        return session.note_bonds(images);
    }
    let state = (chunk.len, chunk.device.into(), pool);
    describe::<PoolMemory>(session, chunk.start, &state);
}

/// Invalidates the record of memory that is about to be freed.
pub fn describe_chunk_end(session: &mut Session, chunk: &Chunk) {
    describe_gone::<PoolMemory>(session, chunk.start);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lasting::{Left, make};
    use crate::engine::objects::pools::Pools;
    use crate::engine::testing::{Fixture, Function, records, sealed};
    use crate::keeper::Name;
    use mpsshim_proto::arena::{VIRTUAL_ARENA, VIRTUAL_UNIT as UNIT};
    use mpsshim_proto::message::memory::{
        Access, Location, PoolAccess, PoolAlloc, PoolAttribute, PoolFree,
    };
    use mpsshim_proto::message::{Op, Range};
    use zerocopy::IntoBytes;

    #[test]
    fn states_are_encoded_as_their_versions_say() {
        let state = PoolState {
            device: 1,
            kind: 1,
            max_size: 300,
            threshold: u64::MAX,
            reuse: [1, 0, 1],
            accesses: vec![(1, -2, 3)],
        };
        let record = Record::of(Kind::Pool, 0, 77, &state);
        let [most @ .., last] = [0xff; 10];
        let threshold = [&most[..], &[last & 1]].concat();
        let expected = [
            &[1, 1, 1, 0xac, 2][..],
            &threshold,
            &[1, 0, 1, 1, 1, 3, 3][..],
        ];
        assert_eq!(record.bytes, expected.concat());
        assert_eq!(record.state(), Some(state));
        let state: <PoolMemory as Lasting>::State = (UNIT, 1, 77);
        let record = Record::of(Kind::PoolMemory, 0, VIRTUAL_ARENA, &state);
        assert_eq!(record.bytes, [1, 0x80, 0x80, 0x80, 1, 1, 77]);
        assert_eq!(record.state(), Some(state));
    }

    fn set(test: &mut Fixture, pool: u64, attribute: u32, value: u64) {
        let body = PoolAttribute {
            pool,
            value,
            attribute,
            pad: 0,
        };
        let status = test.status(Op::PoolSetAttribute, &body, &[]);
        assert_eq!(status, CUDA_SUCCESS);
    }

    fn alloc(test: &mut Fixture, pool: u64, len: u64) -> u64 {
        let body = PoolAlloc {
            pool,
            len,
            stream: test.stream(),
        };
        let range: Range = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        range.start
    }

    /// A session with a pool of 8 units at most, without anything that its server would lose.
    fn described(test: &mut Fixture) -> u64 {
        test.session.lasting.kept = true;
        test.pool(8 * UNIT)
    }

    fn records_of(test: &Fixture) -> Vec<Record> {
        let own = [Kind::Pool, Kind::PoolMemory];
        let mut records = test.session.shared.description.records();
        records.retain(|record| own.contains(&record.kind));
        records
    }

    /// Drops all pools as if the server had ended, and makes these again.
    fn make_again(test: &mut Fixture, records: &[Record]) -> Result<(), Lost> {
        let shared = test.shared.clone();
        let session = &mut test.session;
        session.objects.pools.clear(&shared.gpu);
        session.objects.pools = Pools::default();
        session.lasting.kept = false;
        let mut left = Left::new();
        for record in records {
            let name = Name::numbered(keeper::Kind::Memory, record.key);
            left.insert(name, sealed(b"memory"));
        }
        let made = records.iter().try_for_each(|record| match record.kind {
            Kind::Pool => make::<Pool>(record, session, (&shared, &mut left)),
            _ => make::<PoolMemory>(record, session, (&shared, &mut left)),
        });
        session.lasting.kept = true;
        made
    }

    #[test]
    fn a_pool_is_made_again_with_its_settings_and_its_allocations() {
        let mut test = Fixture::with_devices(2, &[("cuMemSetAccess", records as Function)]);
        let pool = described(&mut test);
        set(&mut test, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 5 * UNIT);
        let opportunistic = CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
        set(&mut test, pool, opportunistic, 0);
        let (first, second) = (alloc(&mut test, pool, 5000), alloc(&mut test, pool, UNIT));
        let [passing, chunk] = [1000, 5000].map(|len| alloc(&mut test, pool, len));
        let stream = test.stream();
        for address in [passing, chunk] {
            let body = PoolFree { address, stream };
            assert_eq!(test.status(Op::PoolFree, &body, &[]), CUDA_SUCCESS);
        }
        let access = Access {
            location: Location {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: 1,
            },
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            pad: 0,
        };
        let body = PoolAccess {
            pool,
            count: 1,
            pad: 0,
        };
        let status = test.status(Op::PoolSetAccess, &body, access.as_bytes());
        assert_eq!(status, CUDA_SUCCESS);
        let attributes = [
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ];
        let before = attributes.map(|attribute| test.pool_attribute(pool, attribute));
        assert_eq!(before[1..3], [5000 + UNIT, 11000 + UNIT]);
        let mut records = records_of(&test);
        // Without a keeper, the memory is not described.
        assert_eq!(records.len(), 1);
        for start in [first, second] {
            let state: <PoolMemory as Lasting>::State = (UNIT, 0, pool);
            let start = start / UNIT * UNIT;
            records.push(Record::of(Kind::PoolMemory, 0, start, &state));
        }
        for records in [records.clone(), records.into_iter().rev().collect()] {
            test.recorded();
            make_again(&mut test, &records).expect("made again");
            let again = attributes.map(|attribute| test.pool_attribute(pool, attribute));
            assert_eq!(again, before);
            let made = test.session.objects.pools.pools.get(pool);
            let made = made.expect("the pool").settings.clone();
            let made = made.map(|settings| (settings.reuse, settings.max_size));
            assert_eq!(made, Some(([1, 0, 1], 8 * UNIT)));
            let accesses = test.recorded();
            let of_second = accesses
                .iter()
                .filter(|call| call[0] / UNIT == second / UNIT);
            assert_eq!(of_second.count(), 2, "of its own device, and of the other");
        }
        let body = PoolFree {
            address: first,
            stream,
        };
        let new = alloc(&mut test, pool, 5000);
        assert!(new >= first + 5000 && new < first + UNIT, "{new:#x}");
        assert_eq!(test.status(Op::PoolFree, &body, &[]), CUDA_SUCCESS);
        let (left, _) = test.session.shared.description.blocks().allocations();
        assert_eq!(left.into_keys().collect::<Vec<_>>(), [new, second]);
    }

    #[test]
    fn allocations_that_cannot_be_are_not_made_again() {
        let mut test = Fixture::new(&[]);
        let pool = described(&mut test);
        let start = alloc(&mut test, pool, 5000);
        let state: <PoolMemory as Lasting>::State = (UNIT, 0, pool);
        let records = [Record::of(Kind::PoolMemory, 0, start, &state)];
        make_again(&mut test, &records).expect("made again");
        for (address, len) in [
            (start + 512, 512),
            (start + 5121, 512),
            (start + 8192, UNIT),
            (start + 8192, u64::MAX),
        ] {
            let blocks = test.session.shared.description.clone();
            blocks.blocks().set(9, address, len);
            let made = make_again(&mut test, &records);
            assert!(made.is_err(), "{address:#x}+{len:#x}");
        }
    }

    #[test]
    fn a_destroyed_pool_has_no_record() {
        let mut test = Fixture::new(&[]);
        let pool = described(&mut test);
        assert_eq!(records_of(&test).len(), 1);
        let body = mpsshim_proto::message::Object { object: pool };
        assert_eq!(test.status(Op::PoolDestroy, &body, &[]), CUDA_SUCCESS);
        assert_eq!(records_of(&test), []);
    }
}
