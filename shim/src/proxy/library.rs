//! Libraries and the kernels in them.
//!
//! A library belongs to no context. When one of its kernels runs in a context, or one of its variables is requested
//! there, it becomes a module of that context ([`module::of_library`]), and the kernel a function. On the server all of
//! a client's contexts on a device are one context, in which a loaded image has one set of variables. So the image that
//! the program loaded serves the first context on each device, and the server loads it again for each further context.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io::Write;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::handshake::MAX_DEVICES;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{GetFunction, Named, Object, Op, Range, Value};
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::context::{self, Context};
use crate::proxy::jit::Said;
use crate::proxy::managed;
use crate::proxy::module::{self, FunctionRef, Layout, Load};
use crate::proxy::objects::{Entry, Table};
use crate::proxy::submit::{Session, session};

static LIBRARIES: Table<Library> = Table::new(Kind::Library);
static KERNELS: Table<Kernel> = Table::new(Kind::Kernel);

/// A kernel and its handle.
pub type KernelRef = &'static Entry<Kernel>;

/// A library.
#[derive(Debug, Default)]
pub struct Library(Mutex<Parts>);

#[derive(Debug, Default)]
struct Parts {
    hash: [u8; 32],
    len: u64,
    /// Memory of its managed variables, one for all contexts; 0 if it has none.
    managed: u64,
    /// The options that it was loaded with: how many, and as they travel.
    options: (u32, Vec<u8>),
    kernels: HashMap<CString, u64>,
    /// Its module in a context, by the context's id.
    modules: BTreeMap<u64, u64>,
    /// The server's devices on which the first load serves a context, or has served one.
    taken: BTreeSet<u32>,
}

/// A kernel of a library.
#[derive(Debug, Default)]
pub struct Kernel {
    library: AtomicU64,
    name: AtomicPtr<CString>,
    layout: AtomicPtr<Layout>,
    /// By the program's ordinal, the function last used in a context of that device.
    functions: [AtomicU64; MAX_DEVICES],
    /// Values set by the program, by ordinal and `CU_FUNC_ATTRIBUTE_*`.
    attributes: Mutex<BTreeMap<(i32, u32), i32>>,
}

impl Kernel {
    /// Handle of its library.
    pub fn library(&self) -> u64 {
        self.library.load(Ordering::Relaxed)
    }
    /// Its name, which lives as long as the process.
    pub fn name(&self) -> &'static CStr {
        // SAFETY: set before the kernel is published, to a name that is never freed.
        unsafe { &*self.name.load(Ordering::Acquire) }
    }
}

/// The kernel of a handle.
#[inline]
pub fn kernel(handle: u64) -> Status<KernelRef> {
    KERNELS.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

fn library(handle: u64) -> Status<&'static Entry<Library>> {
    LIBRARIES.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// A name that lives as long as the process.
fn lasting(name: &CStr) -> &'static CString {
    static NAMES: LazyLock<Mutex<HashSet<&'static CString>>> = LazyLock::new(Mutex::default);
    let mut names = NAMES.lock();
    match names.get(&name.to_owned()) {
        Some(known) => known,
        None => {
            let fresh: &'static CString = Box::leak(Box::new(name.to_owned()));
            names.insert(fresh);
            fresh
        }
    }
}

/// Loads a library: its handle, and the compiler's output, successful or not.
pub fn load(session: &Session, load: Load<'_>) -> (Status<u64>, Said) {
    let mut said = Said::default();
    let status = load_library(session, load, &mut said);
    (status, said)
}

fn load_library(session: &Session, load: Load<'_>, said: &mut Said) -> Status<u64> {
    let hash = module::hash_of(load.content);
    let entry = LIBRARIES.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let handle = LIBRARIES.handle_of(entry);
    let managed = match load.send(session, handle, hash, 0, said) {
        Ok(managed) => managed,
        Err(status) => {
            LIBRARIES.recycle(entry);
            return Err(status);
        }
    };
    *entry.0.lock() = Parts {
        managed,
        hash,
        len: load.content.len() as u64,
        options: (load.options.count, load.options.bytes.clone()),
        ..Parts::default()
    };
    Ok(LIBRARIES.publish(entry))
}

/// `cuLibraryUnload`.
pub fn unload(session: &Session, handle: u64) -> Status {
    let entry = LIBRARIES.retire(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let parts = std::mem::take(&mut *entry.0.lock());
    for module in parts.modules.into_values() {
        let _ = module::end(session, module);
    }
    for kernel in parts.kernels.into_values() {
        if let Some(kernel) = KERNELS.retire(kernel) {
            KERNELS.recycle(kernel);
        }
    }
    let status = session.submit(Op::ImageUnload, &Object { object: handle });
    LIBRARIES.recycle(entry);
    managed::free_of_image(session, parts.managed);
    status
}

/// Whether there is a library with this handle.
pub fn exists(handle: u64) -> Status {
    library(handle).map(drop)
}

/// `cuLibraryGetManaged` of a name: address and length.
pub fn managed(session: &Session, handle: u64, name: &CStr) -> Status<(u64, u64)> {
    session.check()?;
    library(handle)?;
    let body = Named {
        parent: handle,
        device: 0,
        pad: 0,
    };
    let found: Range = session
        .request(Op::GetManaged, &body, name.to_bytes_with_nul())?
        .read()?;
    if found.start != 0 {
        return Ok((found.start, found.len));
    }
    if let Some(line) = managed_refused(name) {
        // The runtime goes on after the refusal, and its program ends with a signal at the variable. Unlike eprintln
        // this does not panic where nothing can be written.
        let _ = writeln!(std::io::stderr(), "{line}");
        tracing::warn!(line, "refused");
    }
    Err(CUDA_ERROR_NOT_SUPPORTED)
}

/// The message about a managed variable that could not be placed in the program's memory, once for each process and
/// name.
fn managed_refused(name: &CStr) -> Option<String> {
    static SAID: Mutex<BTreeSet<CString>> = Mutex::new(BTreeSet::new());
    let name = name.to_owned();
    SAID.lock().insert(name.clone()).then(|| {
        format!(
            "mpsshim: the managed variable `{}` is not supported in proxy mode; run the program with mps-run --mode direct",
            name.to_string_lossy()
        )
    })
}

/// `cuLibraryGetModule`: the module of a library in a context.
pub fn module_in(session: &Session, handle: u64, context: &'static Context) -> Status<u64> {
    session.check()?;
    let context = context.home();
    let entry = library(handle)?;
    let mut parts = entry.0.lock();
    let id = context.id.load(Ordering::Relaxed);
    if let Some(&known) = parts.modules.get(&id) {
        return Ok(known);
    }
    let device = context.server_device;
    let server = if parts.taken.insert(device) {
        handle
    } else {
        load_again(session, &parts, device)?
    };
    let module = module::of_library(context, server, handle, parts.hash)?;
    parts.modules.insert(id, module);
    Ok(module)
}

/// Makes the server load a library again, whose content it still has.
fn load_again(session: &Session, parts: &Parts, device: u32) -> Status<u64> {
    let entry = LIBRARIES.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let handle = LIBRARIES.handle_of(entry);
    let options = (parts.options.0, &parts.options.1[..]);
    let (content, place) = ((parts.hash, parts.len), (device, parts.managed));
    let status = module::load_known(session, handle, content, options, place);
    if let Err(status) = status {
        LIBRARIES.recycle(entry);
        return Err(status);
    }
    Ok(handle)
}

/// A module of a library in a context has ended.
pub fn leave(session: &Session, handle: u64, server: u64, context: &Context) -> Status {
    let still_there = library(handle);
    if let Ok(entry) = still_there {
        let id = context.id.load(Ordering::Relaxed);
        entry.0.lock().modules.remove(&id);
    }
    if server != handle {
        if let Some(entry) = LIBRARIES.claimed(server) {
            LIBRARIES.recycle(entry);
        }
        return session.submit(Op::ImageUnload, &Object { object: server });
    }
    if still_there.is_err() {
        // The library is being unloaded, with everything that was found in it.
        return Ok(());
    }
    let body = Named {
        parent: server,
        device: context.server_device,
        pad: 0,
    };
    session.submit(Op::ImageLeave, &body)
}

/// `cuLibraryGetKernel`: the same handle each time. With a current context its function is loaded there as well,
/// since the program is about to use it.
pub fn get_kernel(session: &Session, handle: u64, name: &CStr) -> Status<u64> {
    session.check()?;
    let entry = library(handle)?;
    if let Some(&known) = entry.0.lock().kernels.get(name) {
        return Ok(known);
    }
    let layout = match context::current() {
        Ok(context) => {
            let module = module_in(session, handle, context)?;
            let function = module::get_function(session, module, name)?;
            module::live_function(function)
                .ok_or(CUDA_ERROR_INVALID_HANDLE)?
                .layout()
        }
        Err(_) => describe(session, handle, entry.0.lock().hash, name)?,
    };
    let kernel = named(handle, name)?;
    let made = KERNELS.get(kernel).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    made.layout
        .store(ptr::from_ref(layout).cast_mut(), Ordering::Release);
    Ok(kernel)
}

/// The handle of a kernel that is known to be there.
pub fn named(handle: u64, name: &CStr) -> Status<u64> {
    let mut parts = library(handle)?.0.lock();
    if let Some(&known) = parts.kernels.get(name) {
        return Ok(known);
    }
    let kernel = KERNELS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    kernel.library.store(handle, Ordering::Relaxed);
    kernel
        .name
        .store(ptr::from_ref(lasting(name)).cast_mut(), Ordering::Release);
    kernel.layout.store(ptr::null_mut(), Ordering::Release);
    for function in &kernel.functions {
        function.store(0, Ordering::Relaxed);
    }
    kernel.attributes.lock().clear();
    let made = KERNELS.publish(kernel);
    parts.kernels.insert(name.to_owned(), made);
    Ok(made)
}

fn describe(
    session: &Session,
    library: u64,
    hash: [u8; 32],
    name: &CStr,
) -> Status<&'static Layout> {
    let body = GetFunction {
        parent: library,
        function: 0,
        device: 0,
        pad: 0,
    };
    Ok(module::request_function(session, &body, hash, name)?.1)
}

/// Names and handles of all kernels: `cuLibraryEnumerateKernels`. None of them is loaded by it.
pub fn kernels(session: &Session, handle: u64, most: usize) -> Status<Vec<u64>> {
    names(session, handle)?
        .iter()
        .take(most)
        .map(|name| named(handle, name))
        .collect()
}

/// The names of all kernels.
pub fn names(session: &Session, handle: u64) -> Status<Vec<CString>> {
    session.check()?;
    library(handle)?;
    module::names_in(session, handle)
}

/// A kernel's parameters.
pub fn layout(session: &Session, kernel: KernelRef) -> Status<&'static Layout> {
    let known = kernel.layout.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: a layout, none of which is ever freed.
        return Ok(unsafe { &*known });
    }
    let handle = kernel.library();
    let hash = library(handle)?.0.lock().hash;
    let layout = describe(session, handle, hash, kernel.name())?;
    kernel
        .layout
        .store(ptr::from_ref(layout).cast_mut(), Ordering::Release);
    Ok(layout)
}

/// The function of a kernel in a context.
#[inline]
pub fn function(kernel: KernelRef, context: &'static Context) -> Status<FunctionRef> {
    let context = context.home();
    match known_function(kernel, context.device) {
        Some(function) if ptr::eq(function.context(), context) => Ok(function),
        _ => find_function(kernel, context),
    }
}

/// The function of a kernel that was last used on a device.
#[inline]
fn known_function(kernel: KernelRef, device: i32) -> Option<FunctionRef> {
    let last = kernel.functions.get(device as usize)?;
    module::live_function(last.load(Ordering::Acquire))
}

#[cold]
fn find_function(kernel: KernelRef, context: &'static Context) -> Status<FunctionRef> {
    let session = session()?;
    let module = module_in(session, kernel.library(), context.usable()?)?;
    let handle = module::get_function(session, module, kernel.name())?;
    let function = module::live_function(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let mut set = Vec::new();
    for ((device, attribute), value) in kernel.attributes.lock().iter() {
        if *device == context.device {
            set.push((*attribute, *value));
        }
    }
    for (attribute, value) in set {
        module::set_attribute(session, function, attribute, value)?;
    }
    if let Some(last) = kernel.functions.get(context.device as usize) {
        last.store(handle, Ordering::Release);
    }
    Ok(function)
}

/// The function that represents a kernel on a device; `None` while there is none.
fn function_on(kernel: KernelRef, device: i32) -> Status<Option<FunctionRef>> {
    if let Some(function) = known_function(kernel, device) {
        return Ok(Some(function));
    }
    match context::current() {
        Ok(context) if context.device == device => find_function(kernel, context).map(Some),
        _ => Ok(None),
    }
}

/// `cuKernelGetAttribute`.
pub fn attribute(session: &Session, kernel: KernelRef, attribute: u32, device: i32) -> Status<i32> {
    match function_on(kernel, device)? {
        Some(function) if function.is_own(attribute) => {
            let set = kernel.attributes.lock().get(&(device, attribute)).copied();
            set.or(function.first(attribute))
                .ok_or(CUDA_ERROR_INVALID_VALUE)
        }
        Some(function) => module::attribute(session, function, attribute),
        None => request_attribute(session, kernel, attribute, device, None),
    }
}

/// `cuKernelSetAttribute`: for all contexts of the device, including future ones.
pub fn set_attribute(
    session: &Session,
    kernel: KernelRef,
    attribute: u32,
    value: i32,
    device: i32,
) -> Status {
    let function = function_on(kernel, device)?;
    module::check_settable(attribute)?;
    match function {
        Some(function) if function.is_own(attribute) => {}
        Some(function) if function.known(attribute) == Some(value) => return session.check(),
        Some(function) => module::set_attribute(session, function, attribute, value)?,
        None => {
            request_attribute(session, kernel, attribute, device, Some(value))?;
        }
    }
    kernel.attributes.lock().insert((device, attribute), value);
    // Other contexts of the device.
    let modules: Vec<u64> = library(kernel.library())?
        .0
        .lock()
        .modules
        .values()
        .copied()
        .collect();
    for module in modules {
        let function = module::known(module, kernel.name())
            .filter(|f| f.context().device == device && !f.is_own(attribute));
        if let Some(function) = function {
            module::set_attribute(session, function, attribute, value)?;
        }
    }
    Ok(())
}

fn request_attribute(
    session: &Session,
    kernel: KernelRef,
    attribute: u32,
    device: i32,
    set: Option<i32>,
) -> Status<i32> {
    let body = KernelAttribute {
        library: kernel.library(),
        device: context::device(device)?
            .server
            .ok_or(CUDA_ERROR_INVALID_DEVICE)?,
        attribute,
        set: set.is_some().into(),
        value: set.unwrap_or(0),
    };
    let name = kernel.name().to_bytes_with_nul();
    let value: Value = session.request(Op::KernelAttribute, &body, name)?.read()?;
    Ok(value.value as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_managed_variable_is_named_once() {
        let line = managed_refused(c"counter_of_tests").expect("a line");
        assert!(line.contains("variable `counter_of_tests` is not supported in proxy mode"));
        assert!(line.ends_with("mps-run --mode direct"), "{line}");
        assert_eq!(managed_refused(c"counter_of_tests"), None);
        assert!(managed_refused(c"another_of_tests").is_some());
    }
}
