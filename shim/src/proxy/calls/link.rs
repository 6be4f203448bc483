//! The linker: it runs in the server, which receives its inputs and returns the result.

use std::ffi::{OsStr, c_void};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use mpsshim_api::cuda::{
    CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
    CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_NUM_INPUT_TYPES, CU_JIT_WALL_TIME,
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY, CUresult,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::image::{LinkAdd, LinkCreate};
use mpsshim_proto::message::{Object, Op};
use mpsshim_proto::ring::MAX_MESSAGE;
use parking_lot::Mutex;

use super::entries;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::proxy::context;
use crate::proxy::jit::{Options, Places, Said};
use crate::proxy::module::sealed;
use crate::proxy::objects::{Entry, Table};
use crate::proxy::submit::session;

entries! {
    cuLinkCreate(_, _, _, _) => create,
    cuLinkCreate_v2(_, _, _, _) => create,
    cuLinkAddData(_, _, _, _, _, _, _, _) => add_data,
    cuLinkAddData_v2(_, _, _, _, _, _, _, _) => add_data,
    cuLinkAddFile(_, _, _, _, _, _) => add_file,
    cuLinkAddFile_v2(_, _, _, _, _, _) => add_file,
    cuLinkComplete(_, _, _) => complete,
    cuLinkDestroy(_) => destroy,
}

static LINKS: Table<Link> = Table::new(Kind::Link);

/// A linker (`CUlinkState`).
#[derive(Debug, Default)]
struct Link {
    /// Destinations of the logs that were requested at creation.
    places: Mutex<Places>,
    /// Its output, kept for the program until the linker is destroyed. Never moved once it exists.
    cubin: Mutex<Option<Box<[u8]>>>,
}

fn link(handle: u64) -> Status<&'static Entry<Link>> {
    LINKS.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// `cuLinkCreate`.
pub unsafe extern "C" fn create(
    count: u32,
    names: In<u32>,
    values: Out<*mut c_void>,
    out: Out<u64>,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let context = context::current()?;
        let options = Options::new(count, names, values).parse()?;
        let entry = LINKS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let body = LinkCreate {
            link: LINKS.handle_of(entry),
            device: context.server_device,
            options: options.count,
            info_log: options.info_log,
            error_log: options.error_log,
        };
        let answer =
            session().and_then(|session| session.request(Op::LinkCreate, &body, &options.bytes));
        if let Err(status) = answer.and_then(|answer| answer.status.ok()) {
            LINKS.recycle(entry);
            return Err(status);
        }
        // There is no output yet.
        options.places.write(&Said::default())?;
        *entry.places.lock() = options.places;
        *entry.cubin.lock() = None;
        out.set(LINKS.publish(entry))
    })
}

/// Options that `cuLinkCreate` takes and an input does not.
const OF_THE_LINK: [u32; 5] = [
    CU_JIT_WALL_TIME,
    CU_JIT_INFO_LOG_BUFFER,
    CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
    CU_JIT_ERROR_LOG_BUFFER,
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
];

/// Sends one input.
fn add(handle: u64, kind: u32, data: &[u8], name: &[u8], options: Options) -> Status {
    let link = link(handle)?;
    if kind >= CU_JIT_NUM_INPUT_TYPES || data.is_empty() || name.len() > MAX_MESSAGE as usize / 4 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if options.has(&OF_THE_LINK)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let options = options.parse()?;
    let body = LinkAdd {
        link: handle,
        len: data.len() as u64,
        kind,
        options: options.count,
    };
    let behind = [&options.bytes, name].concat();
    let file = sealed(data)?;
    let answer = session()?.request_sending(Op::LinkAdd, &body, &behind, file.as_fd(), body.len)?;
    let said = Said::read(&answer.payload);
    link.places.lock().write(&said)?;
    answer.status.ok()
}

/// `cuLinkAddData`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn add_data(
    handle: u64,
    kind: u32,
    data: In<u8>,
    len: usize,
    name: Text,
    count: u32,
    names: In<u32>,
    values: Out<*mut c_void>,
) -> CUresult {
    guard(|| {
        link(handle)?;
        if data.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the program gave `len` bytes.
        let data = unsafe { std::slice::from_raw_parts(data.address(), len) };
        let name = match name.get() {
            Ok(name) => name.to_bytes_with_nul(),
            Err(_) => b"\0",
        };
        add(handle, kind, data, name, Options::new(count, names, values))
    })
}

/// `cuLinkAddFile`.
pub unsafe extern "C" fn add_file(
    handle: u64,
    kind: u32,
    path: Text,
    count: u32,
    names: In<u32>,
    values: Out<*mut c_void>,
) -> CUresult {
    guard(|| {
        link(handle)?;
        let name = path.get()?;
        let data = fs::read(OsStr::from_bytes(name.to_bytes())).map_err(|error| {
            tracing::warn!(%error, ?name, "a file to link cannot be read");
            CUDA_ERROR_FILE_NOT_FOUND
        })?;
        let options = Options::new(count, names, values);
        add(handle, kind, &data, name.to_bytes_with_nul(), options)
    })
}

/// `cuLinkComplete`.
pub unsafe extern "C" fn complete(
    handle: u64,
    out: Out<*const c_void>,
    len: Out<usize>,
) -> CUresult {
    guard(|| {
        let link = link(handle)?;
        out.required()?;
        let session = session()?;
        let body = Object { object: handle };
        let answer = session.request(Op::LinkComplete, &body, &[])?;
        let said = Said::read(&answer.payload);
        link.places.lock().write(&said)?;
        answer.status.ok()?;
        let (_, file) = session.request_receiving(Op::LinkFetch, &body)?;
        let mut content = vec![0; said.cubin() as usize];
        File::from(file)
            .read_exact_at(&mut content, 0)
            .map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        let mut cubin = link.cubin.lock();
        if cubin.is_some() {
            // The driver completes a link once; the output returned to the program must stay valid.
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let cubin = cubin.insert(content.into_boxed_slice());
        len.set_if_wanted(cubin.len());
        out.set(cubin.as_ptr().cast())
    })
}

/// `cuLinkDestroy`.
pub unsafe extern "C" fn destroy(handle: u64) -> CUresult {
    guard(|| {
        let entry = LINKS.retire(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        *entry.places.lock() = Places::default();
        *entry.cubin.lock() = None;
        let status = session()?.submit(Op::LinkDestroy, &Object { object: handle });
        LINKS.recycle(entry);
        status
    })
}
