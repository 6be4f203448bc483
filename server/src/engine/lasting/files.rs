//! Registered memory, which consists of a client's files: the keeper holds their descriptors.

use super::{Lasting, Lost, Making, describe, describe_gone};
use crate::engine::base::account::Memory;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::images::ImageStore;
use crate::engine::objects::files::{
    FileRegistration, FileState, NotAdopted, Payment, bytes_mapped,
};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Name};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Registered memory.
pub struct Registered;

impl Lasting for Registered {
    const KIND: Kind = Kind::Registered;
    type State = FileState;

    fn make(
        record: &Record,
        state: FileState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let file = making.take(name_of_file(record.key))?;
        let adopted = adopt(making.shared, session, (record.key, &state), &file);
        let file = adopted
            .map_err(|error| format!("its registered memory at {:#x}: {error}", record.key))?;
        session.objects.files.insert(record.key, file);
        Ok(())
    }
}

fn adopt(
    shared: &Shared,
    session: &Session,
    (start, state): (u64, &FileState),
    file: &OwnedFd,
) -> Result<FileRegistration, NotAdopted> {
    let gpu = &shared.gpu;
    let device = gpu.device(state.device)?;
    let sizes = bytes_mapped(file, &state.parts, start);
    let (len, mapped) = sizes.map_err(|_| NotAdopted::Shorter)?;
    let paid = Payment {
        charge: session.account.take(Memory::Host, len)?,
        pin: gpu.pinned.add(session.shared.info.uid, mapped),
        place: gpu.held_files.take_over(&session.shared.held_files),
    };
    device.make_current(&gpu.driver)?;
    gpu.arena
        .adopt_file(&gpu.driver, file, (start, state), paid)
}

/// The name under which the keeper holds the file of registered memory at this address.
pub fn name_of_file(start: u64) -> Name {
    Name::numbered(keeper::Kind::File, start)
}

/// Passes the file of new registered memory to the keeper and describes it. Binds the session until the memory is
/// unregistered if the keeper does not hold the file, or if the memory was managed memory.
pub fn describe_file(
    session: &mut Session,
    images: &ImageStore,
    (start, device): (u64, u32),
    parts: &[(u64, u64)],
    fd: BorrowedFd<'_>,
) {
    if !session.lasting.kept {
        return;
    }
    let file = session.objects.files.get(&start);
    let state = file.and_then(|file| file.state(parts, device));
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    match state.filter(|_| keeping.keep(name_of_file(start), fd, holder)) {
        Some(state) => describe::<Registered>(session, start, &state),
        None => {
            session.lasting.unkept_files.insert(start);
            session.note_bonds(images);
        }
    }
}

/// Invalidates the record of memory that is about to be unregistered, and makes the keeper drop its file.
pub fn describe_file_end(session: &mut Session, images: &ImageStore, start: u64) {
    if session.lasting.unkept_files.remove(&start) {
        return session.note_bonds(images);
    }
    describe_gone::<Registered>(session, start);
    images.gpu.keeping.forget(name_of_file(start));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gpu::host::read_word;
    use crate::engine::lasting::{Left, make};
    use crate::engine::testing::{Fixture, Function, records, sealed};
    use mpsshim_api::cuda::*;
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::message::memory::{FilePart, FileRegister};
    use mpsshim_proto::message::{MANAGED, MemGrant, Object, Op, Range};
    use mpsshim_proto::shm::Reservation;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;
    use std::os::fd::AsFd;
    use zerocopy::IntoBytes;

    const PAGE: u64 = 4096;
    /// Where a client may have a mapping. Each test has addresses of its own.
    const MAPPING: u64 = 0x7000_1000_0000;

    fn recording() -> Fixture {
        Fixture::with_keeper(&[("cuMemHostRegister_v2", records as Function)])
    }

    fn register(test: &mut Fixture, fd: impl AsFd, body: &FileRegister, rest: &[u8]) -> u64 {
        test.sends(fd);
        let range: Range = test.reply(Op::FileRegister, body, rest).expect("a file");
        assert_eq!(range.len, body.len);
        range.start
    }

    fn bonds(test: &Fixture) -> Bonds {
        test.session.shared.description.bonds()
    }

    fn registered(test: &Fixture) -> Vec<Record> {
        let mut records = test.session.shared.description.records();
        records.retain(|record| record.kind == Kind::Registered);
        records
    }

    fn held(test: &Fixture, start: u64) -> bool {
        let keeper = test.shared.gpu.keeping.keeper().expect("a keeper");
        keeper.holds(&name_of_file(start))
    }

    /// Unregisters all files as if the server had ended, does something else, and registers them again from the
    /// records and the keeper's descriptors.
    fn make_again(test: &mut Fixture, meanwhile: impl FnOnce()) -> Result<(), Lost> {
        let shared = test.shared.clone();
        let keeper = shared.gpu.keeping.keeper().expect("a keeper");
        for file in std::mem::take(&mut test.session.objects.files).into_values() {
            shared.gpu.unregister_file(file);
        }
        assert_eq!(test.held_host(), 0);
        meanwhile();
        let mut left: Left = keeper.list().expect("a list");
        let all = registered(test);
        let session = &mut test.session;
        session.lasting.kept = false;
        let made = all
            .iter()
            .try_for_each(|record| make::<Registered>(record, session, (&shared, &mut left)));
        session.lasting.kept = true;
        made
    }

    #[test]
    fn states_are_encoded_as_their_version_says() {
        let state = FileState {
            parts: vec![(0, 300), (4, 5)],
            device: 1,
            at_clients: true,
            writable: false,
        };
        let record = Record::of(Kind::Registered, 0, MAPPING, &state);
        assert_eq!(record.bytes, [1, 2, 0, 0xac, 2, 4, 5, 1, 1, 0]);
        assert_eq!(record.state(), Some(state));
    }

    #[test]
    fn registered_memory_is_made_again_where_it_was() {
        let mut test = recording();
        let of_arena = FileRegister {
            offset: 2 * PAGE,
            len: 3 * PAGE,
            ..FileRegister::default()
        };
        let further = FilePart {
            offset: 0,
            len: 2 * PAGE,
        };
        let of_client = FileRegister {
            len: 2 * PAGE,
            address: MAPPING,
            flags: CU_MEMHOSTREGISTER_READ_ONLY,
            ..FileRegister::default()
        };
        let pages = [1, 2, 3].map(|byte| [byte; PAGE as usize]).concat();
        let arena = register(&mut test, sealed(&pages), &of_arena, further.as_bytes());
        let own = register(&mut test, sealed(&pages), &of_client, &[]);
        assert_eq!(own, MAPPING);
        assert_eq!(bonds(&test), Bonds::default());
        let keys: Vec<u64> = registered(&test).iter().map(|record| record.key).collect();
        assert_eq!(keys, [arena, own]);
        let before = test.recorded();
        let pinned = test.shared.gpu.pinned.held(0);
        for _ in 0..2 {
            make_again(&mut test, || {}).expect("made again");
            let again = test.recorded();
            let first = |calls: &[[u64; 6]]| calls.iter().map(|call| call[..3].to_vec()).collect();
            let [first, again]: [Vec<Vec<u64>>; 2] = [first(&before), first(&again)];
            assert_eq!(again, first, "addresses, bytes and flags");
            assert_eq!(test.held_host(), 5 * PAGE);
            assert_eq!(test.shared.gpu.pinned.held(0), pinned);
        }
        assert!(test.owns(arena + 3 * PAGE - 8) && !test.owns(own));
        let found = [0, PAGE, 2 * PAGE].map(|at| read_word(arena + at, false) as u8);
        assert_eq!(found, [3, 1, 2]);
        let file = Object { object: arena };
        assert_eq!(test.status(Op::FileUnregister, &file, &[]), CUDA_SUCCESS);
        assert!(!held(&test, arena) && held(&test, own));
        let keys: Vec<u64> = registered(&test).iter().map(|record| record.key).collect();
        assert_eq!(keys, [own]);
        assert_eq!(test.buried(), 1);
        // The address can be used again.
        let arena = register(&mut test, sealed(&pages), &of_arena, further.as_bytes());
        assert!(held(&test, arena));
    }

    #[test]
    fn memory_whose_addresses_are_in_use_is_not_made_again() {
        let mut test = recording();
        let of_client = FileRegister {
            len: PAGE,
            address: MAPPING + (1 << 20),
            ..FileRegister::default()
        };
        let start = register(&mut test, sealed(&[0; PAGE as usize]), &of_client, &[]);
        assert_eq!(start, of_client.address);
        test.recorded();
        let mut other = None;
        let made = make_again(&mut test, || other = Reservation::at(start, PAGE).ok());
        let why =
            format!("its registered memory at {start:#x}: its addresses are in use in this server");
        assert_eq!(made, Err(why));
        assert!(other.is_some() && test.recorded().is_empty());
        assert!(!held(&test, start) && test.session.objects.files.is_empty());
        assert_eq!(test.held_host(), 0);
    }

    #[test]
    fn memory_whose_file_was_truncated_is_not_made_again() {
        let mut test = recording();
        let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).expect("a file");
        ftruncate(&file, 2 * PAGE as i64).expect("two pages");
        let body = FileRegister {
            len: 2 * PAGE,
            ..FileRegister::default()
        };
        let start = register(&mut test, &file, &body, &[]);
        let made = make_again(&mut test, || {
            ftruncate(&file, PAGE as i64).expect("one page")
        });
        let why = format!("its registered memory at {start:#x}: its file has become shorter");
        assert_eq!(made, Err(why));
        assert!(!held(&test, start) && test.session.objects.files.is_empty());
        assert_eq!(test.held_host(), 0);
    }

    #[test]
    fn memory_at_addresses_of_managed_memory_binds_until_it_is_unregistered() {
        let mut test = recording();
        let grant = MemGrant {
            len: 2 << 20,
            device: 0,
            flags: MANAGED,
        };
        let address = test.reply(Op::MemGrant, &grant, &[]).expect("memory");
        let body = FileRegister {
            len: grant.len,
            address,
            ..FileRegister::default()
        };
        let object = register(&mut test, sealed(&vec![0; grant.len as usize]), &body, &[]);
        // This driver does not export the memory to the keeper.
        let unkept = Bonds::UNKEPT;
        let bound = unkept.with(Bonds::REGISTERED, true);
        assert_eq!((object, bonds(&test)), (address, bound));
        assert!(!held(&test, object) && registered(&test).is_empty());
        let file = Object { object };
        assert_eq!(test.status(Op::FileUnregister, &file, &[]), CUDA_SUCCESS);
        assert_eq!(bonds(&test), unkept);
    }

    #[test]
    fn memory_without_room_in_the_keeper_binds_until_it_is_unregistered() {
        // Without a keeper, there is no room.
        let mut test = Fixture::new(&[]);
        test.session.lasting.kept = true;
        let body = FileRegister {
            len: PAGE,
            ..FileRegister::default()
        };
        let object = register(&mut test, sealed(&[0; PAGE as usize]), &body, &[]);
        let unkept = Bonds::UNKEPT;
        assert_eq!(bonds(&test), unkept.with(Bonds::REGISTERED, true));
        assert_eq!(registered(&test), []);
        let file = Object { object };
        assert_eq!(test.status(Op::FileUnregister, &file, &[]), CUDA_SUCCESS);
        assert_eq!(bonds(&test), unkept);
    }
}
