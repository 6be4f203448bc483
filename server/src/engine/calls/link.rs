//! The linker.

use super::reply::{Logged, Reply};
use crate::engine::base::bounds;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::jit::JitOptions;
use crate::engine::base::kinds::Kind;
use crate::engine::base::pinned::is_affordable;
use crate::engine::calls::module::receive_descriptor;
use crate::engine::images::contents::is_whole;
use crate::engine::lasting::{Lasting, Lost, Making, describe, failed};
use crate::engine::objects::links::{Link, LinkThread, Linker};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::image::{LinkAdd, LinkCreate};
use mpsshim_proto::shm::{self, is_sealed, read_sealed};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use zerocopy::IntoBytes;

/// `cuLinkCreate`.
pub fn link_create(session: &mut Session, shared: &Shared, call: Call<'_, LinkCreate>) -> Reply {
    let Call { body, message } = call;
    let behind = message.behind::<LinkCreate>()?;
    let (mut options, _) = JitOptions::read(&behind, body.options).map_err(CallError::Violation)?;
    options.want(body.info_log, body.error_log);
    let device = shared.gpu.device(body.device)?;
    if session.objects.links.len() >= bounds::LINKS {
        return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
    }
    let thread = LinkThread::new()?;
    let raw = thread.install(|| -> Result<_, CUresult> {
        device.make_current(&shared.gpu.driver)?;
        let mut raw = CUlinkState::NULL;
        let (count, names, values) = options.raw()?;
        let image = &shared.gpu.driver.image;
        image.link_create(count, names, values, &mut raw)?;
        Ok(raw)
    })?;
    let linker = Linker {
        raw,
        thread,
        options,
    };
    let link = Link {
        linker: Some(linker),
        ..Link::default()
    };
    if let Err((status, link)) = session.objects.links.insert(body.link, link) {
        link.end(shared);
        return Err(status.into());
    }
    Ok(Vec::new())
}

/// `cuLinkAddData`. Files are read by the client.
pub fn link_add(session: &mut Session, shared: &Shared, call: Call<'_, LinkAdd>) -> Logged {
    let Call { body, message } = call;
    let behind = message.behind::<LinkAdd>()?;
    let (mut options, name) =
        JitOptions::read(&behind, body.options).map_err(CallError::Violation)?;
    let Some(end) = name.iter().position(|byte| *byte == 0) else {
        return Err(CallError::Violation("a name without its end".into()));
    };
    let name = &name[..=end];
    let data = match message.token {
        0 => Err(CUDA_ERROR_INVALID_VALUE),
        token => received(receive_descriptor(session, token)?.as_fd(), body.len),
    };
    let linker = session.objects.links.get_mut(body.link)?.linker()?;
    let mut data = data?;
    if body.kind >= CU_JIT_NUM_INPUT_TYPES {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let raw = linker.raw;
    let status = linker.thread.install(|| {
        let (count, names, values) = options.raw()?;
        shared.gpu.driver.image.link_add_data(
            raw,
            body.kind,
            data.as_mut_ptr(),
            body.len as usize,
            name.as_ptr().cast(),
            count,
            names,
            values,
        )
    });
    Ok((status, linker.options.outcome(0)))
}

/// `cuLinkComplete`.
pub fn link_complete(session: &mut Session, shared: &Shared, body: Object) -> Logged {
    let link = session.objects.links.get_mut(body.object)?;
    let linker = link.linker()?;
    let raw = linker.raw;
    let completed = linker.thread.install(|| {
        let (mut cubin, mut len) = (std::ptr::null(), 0);
        let image = &shared.gpu.driver.image;
        image.link_complete(raw, &mut cubin, &mut len)?;
        if cubin.is_null() {
            return Ok(None);
        }
        // SAFETY: the driver's result, which stays until the link is destroyed.
        Ok(Some(
            unsafe { std::slice::from_raw_parts(cubin, len) }.to_vec(),
        ))
    });
    let cubin = match &completed {
        Ok(Some(cubin)) => cubin.len() as u64,
        _ => 0,
    };
    let outcome = linker.options.outcome(cubin);
    let status = completed.map(|cubin| link.cubin = cubin.or(link.cubin.take()));
    Ok((status, outcome))
}

/// Sends the cubin of a completed link over the socket, before the answer, under the message's token.
pub fn link_fetch(session: &mut Session, shared: &Shared, call: Call<'_, Object>) -> Reply {
    let Call { body, message } = call;
    let link = session.objects.links.get_mut(body.object)?;
    let cubin = link.cubin.as_ref().ok_or(CUDA_ERROR_NOT_FOUND)?;
    let file = || -> std::io::Result<File> {
        let mut file = File::from(shm::sealed_memfd(c"cubin", cubin.len() as u64)?);
        file.write_all(cubin)?;
        Ok(file)
    };
    let file = file().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let note = DescriptorNote {
        token: message.token,
        len: cubin.len() as u64,
    };
    shm::send_packet(session.shared.socket(), note.as_bytes(), &[file.as_fd()])
        .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    if !std::mem::replace(&mut link.fetched, true) {
        describe::<Linked>(session, body.object, &());
        session.note_bonds(&shared.images);
    }
    Ok(Vec::new())
}

/// A linker whose cubin the client has. Of its calls, the next server executes only its destruction.
pub struct Linked;

impl Lasting for Linked {
    const KIND: Kind = Kind::Linked;
    /// Nothing.
    type State = ();

    fn make(
        record: &Record,
        (): Self::State,
        session: &mut Session,
        _: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let link = Link {
            fetched: true,
            ..Link::default()
        };
        let inserted = session.objects.links.insert(record.key, link);
        inserted
            .map(drop)
            .map_err(|(status, _)| failed("a linker", record)(status))
    }
}

/// `cuLinkDestroy`.
pub fn link_destroy(session: &mut Session, shared: &Shared, body: Object) -> Result<(), CallError> {
    let link = session.objects.links.remove(body.object)?;
    link.end(shared);
    Ok(())
}

impl Link {
    /// `cuLinkDestroy`; afterwards, nothing refers to the options any more.
    pub fn end(self, shared: &Shared) {
        if let Some(Linker { raw, thread, .. }) = self.linker {
            let _ = thread.install(|| shared.gpu.driver.image.link_destroy(raw));
        }
    }
}

/// A copy of a client's input, followed by a NUL.
fn received(fd: BorrowedFd<'_>, len: u64) -> Result<Vec<u8>, CUresult> {
    if len == 0 || len > bounds::LINK_INPUT || !is_sealed(fd, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !is_affordable(len) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mut bytes = vec![0u8; len as usize + 1];
    let input = &mut bytes[..len as usize];
    read_sealed(fd, input).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if !is_whole(input) {
        return Err(CUDA_ERROR_INVALID_IMAGE);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lasting::{self, Left};
    use crate::engine::session::bonds::Destination;
    use crate::engine::testing::{FAULT, Fixture, Function, counts, obeys, others, sealed};
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::handle::Kind as HandleKind;
    use mpsshim_proto::message::Op;

    const TEXT: &[u8] = b".version 8.0";

    fn create(test: &mut Fixture) -> LinkCreate {
        LinkCreate {
            link: test.new_handle(HandleKind::Link),
            ..LinkCreate::default()
        }
    }

    fn link(test: &mut Fixture) -> u64 {
        let body = create(test);
        assert_eq!(test.status(Op::LinkCreate, &body, &[]), CUDA_SUCCESS);
        body.link
    }

    fn add(link: u64) -> LinkAdd {
        LinkAdd {
            link,
            len: TEXT.len() as u64,
            kind: 1,
            options: 0,
        }
    }

    #[test]
    fn a_linker_that_is_not_created_has_no_handle() {
        let mut test = Fixture::new(&[("cuLinkDestroy", counts as Function)]);
        let good = create(&mut test);
        let elsewhere = LinkCreate { device: 1, ..good };
        let status = test.status(Op::LinkCreate, &elsewhere, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        for options in [1, u32::MAX] {
            let body = LinkCreate { options, ..good };
            assert!(test.is_violation(Op::LinkCreate, &body, &[]), "{options}");
        }
        assert_eq!(test.session.objects.links.len(), 0);
        for (status, ended) in [(CUDA_SUCCESS, 0), (CUDA_ERROR_INVALID_HANDLE, 1)] {
            assert_eq!(test.status(Op::LinkCreate, &good, &[]), status);
            assert_eq!(test.calls(), ended);
        }
        for _ in 1..bounds::LINKS {
            link(&mut test);
        }
        let more = create(&mut test);
        let status = test.status(Op::LinkCreate, &more, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_OUT_OF_MEMORY, 0));
        assert_eq!(test.session.objects.links.len(), bounds::LINKS);
    }

    #[test]
    fn a_linker_that_the_driver_does_not_create_can_be_created_later() {
        let mut test = Fixture::new(&[("cuLinkCreate_v2", obeys as Function)]);
        let body = create(&mut test);
        for (status, links) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, 1)] {
            test.orders(status);
            assert_eq!(test.told(Op::LinkCreate, &body, &[]), status);
            assert_eq!(test.session.objects.links.len(), links);
        }
        test.orders(FAULT);
        let more = create(&mut test);
        assert_eq!(test.told(Op::LinkCreate, &more, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn input_that_cannot_be_is_not_given_to_the_linker() {
        let mut test = Fixture::new(&[("cuLinkAddData_v2", counts as Function)]);
        let good = add(link(&mut test));
        let open = || File::open("/proc/self/exe").expect("a file").into();
        let (value, image) = (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_IMAGE);
        let len = |len| LinkAdd { len, ..good };
        let kind = LinkAdd {
            kind: CU_JIT_NUM_INPUT_TYPES,
            ..good
        };
        for (file, body, status) in [
            (sealed(TEXT), len(0), value),
            (sealed(TEXT), len(TEXT.len() as u64 + 1), value),
            (sealed(TEXT), len(bounds::LINK_INPUT + 1), value),
            (sealed(TEXT), kind, value),
            (open(), good, value),
            (sealed(&[0; TEXT.len()]), good, image),
        ] {
            test.sends(file);
            let refused = test.status(Op::LinkAdd, &body, b"name\0");
            assert_eq!(refused, status, "{} {}", body.len, body.kind);
        }
        for link in others(good.link) {
            test.sends(sealed(TEXT));
            let status = test.status(Op::LinkAdd, &add(link), b"name\0");
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{link:#x}");
        }
        let status = test.status(Op::LinkAdd, &good, b"name\0");
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "without a descriptor");
        test.claims_descriptor();
        assert!(test.is_violation(Op::LinkAdd, &good, b"name\0"));
        assert!(test.is_violation(Op::LinkAdd, &good, b"name"));
        let options = LinkAdd { options: 1, ..good };
        assert!(test.is_violation(Op::LinkAdd, &options, b"name\0"));
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn input_that_the_linker_refuses_is_the_clients_error_and_a_fault_its_end() {
        let mut test = Fixture::new(&[("cuLinkAddData_v2", obeys as Function)]);
        let body = add(link(&mut test));
        for (status, ends) in [
            (CUDA_ERROR_INVALID_PTX, false),
            (CUDA_SUCCESS, false),
            (FAULT, true),
        ] {
            test.orders(status);
            test.sends(sealed(TEXT));
            assert_eq!(test.told(Op::LinkAdd, &body, b"name\0"), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }

    /// Gives a cubin of 5 bytes, unless ordered otherwise.
    extern "C" fn completes(_: u64, cubin: &mut *const u8, len: &mut usize) -> CUresult {
        if obeys() == CUDA_SUCCESS {
            (*cubin, *len) = (b"cubin".as_ptr(), 5);
        }
        obeys()
    }

    #[test]
    fn a_cubin_is_fetched_from_a_completed_link_only() {
        let mut test = Fixture::new(&[("cuLinkComplete", completes as Function)]);
        let object = link(&mut test);
        let body = Object { object };
        for object in others(object) {
            for op in [Op::LinkComplete, Op::LinkFetch] {
                let status = test.status(op, &Object { object }, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{op:?} {object:#x}");
            }
        }
        for (status, fetched) in [
            (CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_NOT_FOUND),
            (CUDA_SUCCESS, CUDA_SUCCESS),
        ] {
            test.orders(status);
            assert_eq!(test.told(Op::LinkComplete, &body, &[]), status);
            assert_eq!(test.status(Op::LinkFetch, &body, &[]), fetched);
        }
        test.hangs_up();
        let status = test.status(Op::LinkFetch, &body, &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY);
        test.orders(FAULT);
        assert_eq!(test.told(Op::LinkComplete, &body, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn a_linker_binds_until_its_cubin_is_fetched_and_is_described_then() {
        let mut test = Fixture::with_keeper(&[("cuLinkComplete", completes as Function)]);
        let object = link(&mut test);
        let body = Object { object };
        let binds = |test: &Fixture| {
            let bonds = test
                .session
                .bonds(&test.shared.images, Destination::NextServer);
            bonds.0 & Bonds::LINKERS.0 != 0
        };
        assert!(binds(&test));
        assert_eq!(test.told(Op::LinkComplete, &body, &[]), CUDA_SUCCESS);
        assert!(binds(&test));
        assert_eq!(test.told(Op::LinkFetch, &body, &[]), CUDA_SUCCESS);
        assert!(!binds(&test));
        let records = test.session.shared.description.records();
        let mut linked = records.into_iter().filter(|one| one.kind == Kind::Linked);
        let record = linked.next().expect("a record");
        // As in the next server.
        let link = test.session.objects.links.remove(object).expect("it");
        link.end(&test.shared);
        let shared = test.shared.clone();
        let with = (&*shared, &mut Left::new());
        assert_eq!(
            lasting::make::<Linked>(&record, &mut test.session, with),
            Ok(())
        );
        assert!(!binds(&test));
        for (op, status) in [
            (Op::LinkComplete, CUDA_ERROR_INVALID_HANDLE),
            (Op::LinkFetch, CUDA_ERROR_NOT_FOUND),
            (Op::LinkDestroy, CUDA_SUCCESS),
            (Op::LinkDestroy, CUDA_ERROR_INVALID_HANDLE),
        ] {
            assert_eq!(test.status(op, &body, &[]), status, "{op:?}");
        }
    }

    #[test]
    fn a_linker_is_destroyed_once() {
        let mut test = Fixture::new(&[("cuLinkDestroy", counts as Function)]);
        let object = link(&mut test);
        for object in others(object) {
            let status = test.status(Op::LinkDestroy, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
        }
        assert_eq!(test.calls(), 0);
        for (status, ended) in [(CUDA_SUCCESS, 1), (CUDA_ERROR_INVALID_HANDLE, 0)] {
            let body = Object { object };
            assert_eq!(test.status(Op::LinkDestroy, &body, &[]), status);
            assert_eq!(test.calls(), ended);
        }
    }
}
