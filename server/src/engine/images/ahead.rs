//! Images that a standby loads ahead: while the server before it still works, and before the sessions come.
//!
//! A temporary keeper has the contents and the descriptions of the sessions, whose records say how each image was loaded
//! and which of its functions were looked up. The driver's objects wait here; at the adoption, the load of an image with
//! the same content, options and kind of handle takes one of them instead of calling the driver. The rest are unloaded
//! before the clients go on.
//!
//! The list of images may come several times: each time, the standby loads the images that it lacks and unloads the others
//! that it has.
//!
//! Images with logs, printing, allocating or managed ones are loaded at the adoption.

use crate::engine::base::call::Incoming;
use crate::engine::base::description::{Description, Record};
use crate::engine::base::driver::{Driver, is_sticky};
use crate::engine::base::jit::JitOptions;
use crate::engine::base::kinds;
use crate::engine::base::side::Side;
use crate::engine::gpu::cubin::{self, Calls};
use crate::engine::gpu::devices::{Device, Devices};
use crate::engine::gpu::open::OpenDriver;
use crate::engine::images::contents::Raw;
use crate::engine::images::family::Family;
use crate::engine::images::packs;
use crate::keeper::{Keeper, Kind, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::message::{GetFunction, ImageLoad, Op};
use mpsshim_proto::shm::Mapping;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time that loading ahead may take; an image that is being loaded is completed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Part (1/`LEAST_FREE`) of a device's memory that stays free for the clients of the server before.
const LEAST_FREE: u64 = 32;

/// Bytes that the driver may read for as long as the image is loaded, with the NUL at their end.
#[derive(Debug)]
enum Source {
    /// A content's own memory file.
    Mapped(Mapping),
    /// A copy from a pack, which the server before still changes.
    Copied(Box<[u8]>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: the mapping lives as long as self; a content is not written once it is known.
            Source::Mapped(file) => unsafe { std::slice::from_raw_parts(file.base(), file.len()) },
            Source::Copied(bytes) => bytes,
        }
    }
}

/// A module or library in the driver, with the memory that the driver may still refer to.
#[derive(Debug)]
pub struct Loaded {
    /// The driver's object.
    pub raw: Raw,
    _options: Box<JitOptions>,
    /// `None`: the instance has the content.
    _source: Option<Arc<Source>>,
}

impl Loaded {
    /// A new object; the caller keeps its content.
    pub fn new(raw: Raw, options: JitOptions) -> Loaded {
        Loaded {
            raw,
            _options: Box::new(options),
            _source: None,
        }
    }
}

/// An object that waits for its session.
#[derive(Debug)]
struct Waiting {
    loaded: Loaded,
    /// The encoded outcome of its JIT options.
    said: Vec<u8>,
    /// Devices on which a function of a library was looked up.
    looked_into: BTreeSet<u32>,
}

/// The images that a standby has loaded ahead, and their analyses.
#[derive(Debug, Default)]
pub struct Ahead {
    ready: HashMap<Family, Vec<Waiting>>,
    calls: HashMap<[u8; 32], Calls>,
    /// Whether one instance is enough for all sessions.
    shared: HashMap<Family, bool>,
    /// Number of images loaded.
    count: usize,
}

impl Ahead {
    /// Unloads all images but `needed` of each family. Returns how many were unloaded.
    fn reduce(
        &mut self,
        (driver, devices): (&Driver, &Devices),
        needed: &HashMap<Family, usize>,
    ) -> Result<usize, CUresult> {
        let mut over = Vec::new();
        for (family, waiting) in &mut self.ready {
            let most = needed.get(family).copied().unwrap_or(0);
            let surplus = waiting.split_off(most.min(waiting.len()));
            over.extend(surplus.into_iter().map(|one| (family.clone(), one)));
        }
        self.ready.retain(|_, waiting| !waiting.is_empty());
        self.count -= over.len();
        let count = over.len();
        for (family, waiting) in over {
            match end_waiting((driver, devices), &family, waiting) {
                Err(status) if is_sticky(status) => return Err(status),
                _ => {}
            }
        }
        Ok(count)
    }
}

/// Unloads an image. A failure is logged and returned.
fn end_waiting(
    (driver, devices): (&Driver, &Devices),
    family: &Family,
    waiting: Waiting,
) -> Result<(), CUresult> {
    let device = match family.device {
        Some(device) => Some(&devices[device]),
        None => devices.iter().find(|device| device.is_attached()),
    };
    if let Some(device) = device {
        let _ = device.make_current(driver);
    }
    unload(driver, waiting.loaded.raw).inspect_err(
        |status| tracing::warn!(%status, "an image that was loaded ahead is not unloaded"),
    )
}

/// The images that no session has taken yet.
#[derive(Debug, Default)]
pub struct Unclaimed(Mutex<Ahead>);

impl Unclaimed {
    /// Adds the images of a standby, and returns the analyses of their contents.
    pub fn fill(&self, mut ahead: Ahead) -> HashMap<[u8; 32], Calls> {
        let calls = std::mem::take(&mut ahead.calls);
        *self.0.lock() = ahead;
        calls
    }

    /// Takes an image of a family, with the encoded outcome of its JIT options.
    pub fn take(&self, family: &Family) -> Option<(Loaded, Vec<u8>)> {
        let found = self.0.lock().ready.get_mut(family)?.pop()?;
        Some((found.loaded, found.said))
    }

    /// Unloads the images that are left, and says in the log how many were used.
    pub fn end(&self, driver: &Driver, devices: &Devices) {
        let ahead = std::mem::take(&mut *self.0.lock());
        if ahead.count == 0 {
            return;
        }
        let mut left = 0;
        for (family, waiting) in ahead.ready {
            for one in waiting {
                left += 1;
                let _ = end_waiting((driver, devices), &family, one);
            }
        }
        tracing::info!(
            "Images loaded ahead: {} used, {left} unloaded",
            ahead.count - left
        );
    }
}

/// `cuModuleUnload` or `cuLibraryUnload`.
///
/// # Errors
/// Driver errors.
pub fn unload(driver: &Driver, raw: Raw) -> Result<(), CUresult> {
    match raw {
        Raw::Module(module) => driver.module_unload(module),
        Raw::Library(library) => driver.library_unload(library),
    }
}

/// `cuModuleLoadDataEx` or `cuLibraryLoadData`.
///
/// # Errors
/// The driver's error, or `CUDA_ERROR_INVALID_VALUE` for options that must not reach it.
pub fn load_raw(
    driver: &Driver,
    is_library: bool,
    content: &[u8],
    options: &mut JitOptions,
) -> Result<Raw, CUresult> {
    let (count, options, values) = options.raw()?;
    let content = content.as_ptr();
    if is_library {
        let mut library = CUlibrary::NULL;
        let none = std::ptr::null_mut();
        driver.library_load_data(
            &mut library,
            content,
            options,
            values,
            count,
            none,
            none.cast(),
            0,
        )?;
        Ok(Raw::Library(library))
    } else {
        let mut module = CUmodule::NULL;
        driver.module_load_data_ex(&mut module, content, count, options, values)?;
        Ok(Raw::Module(module))
    }
}

/// An image as the sessions have loaded it.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    family: Family,
    /// Number of sessions' images.
    times: usize,
    /// One function that was looked up on each device: the driver loads a library when that happens.
    functions: BTreeMap<u32, Vec<u8>>,
}

/// The images of all sessions, in the order of their loads.
#[derive(Debug, Default)]
struct List {
    wanted: Vec<Wanted>,
    places: HashMap<Family, usize>,
}

impl List {
    /// Adds the images of one session. Records that no server of this release has written are left out.
    fn add(&mut self, devices: &Devices, records: &[Record]) {
        let mut of_handle = HashMap::new();
        for record in records.iter().filter(|one| one.kind == kinds::Kind::Makes) {
            let Some(message) = record.state::<Vec<u8>>() else {
                continue;
            };
            match Op::from_u16(record.op) {
                Some(op @ Op::ImageLoad) => {
                    let message = Incoming::copied(op, 0, &message);
                    if let Some((handle, at)) = self.add_image(devices, message) {
                        of_handle.insert(handle, at);
                    }
                }
                Some(op @ Op::GetFunction) => {
                    let message = Incoming::copied(op, 0, &message);
                    let (body, name) =
                        (message.body::<GetFunction>(), message.name::<GetFunction>());
                    if let (Ok(body), Ok(name)) = (body, name)
                        && let Some(at) = of_handle.get(&body.parent)
                    {
                        let functions = &mut self.wanted[*at].functions;
                        functions.entry(body.device).or_insert(name);
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds an image; returns its handle and its place in the list.
    fn add_image(&mut self, devices: &Devices, message: Incoming<'_>) -> Option<(u64, usize)> {
        let body = message.body::<ImageLoad>().ok()?;
        let options = message.behind::<ImageLoad>().ok()?;
        let device = devices.get(body.device).ok()?.ordinal;
        let family = Family::of(&body, device, Side::MAIN, &options);
        let family = family.filter(|_| body.managed == 0)?;
        let at = *self.places.entry(family.clone()).or_insert_with(|| {
            self.wanted.push(Wanted {
                family,
                times: 0,
                functions: BTreeMap::new(),
            });
            self.wanted.len() - 1
        });
        self.wanted[at].times += 1;
        Some((body.image, at))
    }
}

/// Contents by SHA-256.
type Sources = HashMap<[u8; 32], Arc<Source>>;

/// The images of the sessions that a temporary keeper describes, and their contents.
fn read(devices: &Devices, keeper: &Keeper) -> io::Result<(List, Sources)> {
    let (mut list, mut files) = (List::default(), Vec::new());
    for (name, file) in keeper.list()? {
        match name.kind {
            Kind::Description => {
                let description = Description::open(file)?;
                if description.is_readable() {
                    list.add(devices, &description.records_beside_writer());
                }
            }
            Kind::Content | Kind::Pack => files.push((name, file)),
            _ => {}
        }
    }
    let mut sources = Sources::new();
    for (name, file) in files {
        add_sources(&mut sources, name, file)?;
    }
    Ok((list, sources))
}

fn add_sources(sources: &mut Sources, name: Name, file: OwnedFd) -> io::Result<()> {
    if name.kind == Kind::Pack {
        let copied = packs::copies(file.as_fd())?.into_iter();
        sources.extend(copied.map(|(hash, bytes)| (hash, Arc::new(Source::Copied(bytes)))));
        return Ok(());
    }
    let file = std::fs::File::from(file);
    let len = file.metadata()?.len() as usize;
    if len > 1 {
        let mapping = Mapping::sparse(file.as_fd(), len)?;
        sources.insert(name.id, Arc::new(Source::Mapped(mapping)));
    }
    Ok(())
}

/// Why no more images are loaded ahead.
enum Stop {
    /// The sessions come, the time is over, or a device is short of memory.
    Enough,
    /// The context is lost.
    Lost(CUresult),
}

impl From<CUresult> for Stop {
    fn from(status: CUresult) -> Stop {
        match is_sticky(status) {
            true => Stop::Lost(status),
            false => Stop::Enough,
        }
    }
}

struct Loading<'a> {
    opened: &'a OpenDriver,
    stop: &'a (dyn Fn() -> bool + Sync),
    until: Instant,
    ahead: &'a mut Ahead,
    /// Number of images loaded by this order.
    loaded: usize,
}

impl OpenDriver {
    /// Loads the images of the sessions that a temporary keeper describes, as far as they are not loaded, until `stop` says so,
    /// for 20 s at most; and unloads the others. Failures mean that fewer images are loaded.
    ///
    /// # Errors
    /// The status with which the context was lost.
    pub fn load_ahead(
        &self,
        ahead: &mut Ahead,
        keeper: Keeper,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), CUresult> {
        let began = Instant::now();
        let read = read(&self.devices, &keeper);
        drop(keeper);
        let (list, sources) = match read {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!("No images are loaded ahead: {error}");
                return Ok(());
            }
        };
        let mut loading = Loading {
            opened: self,
            stop,
            until: began + PATIENCE,
            ahead,
            loaded: 0,
        };
        let different = list.wanted.len();
        let needed = loading.needed(&list, &sources);
        let on = (&self.driver, &self.devices);
        let unloaded = loading.ahead.reduce(on, &needed)?;
        let outcome = loading.load_all(&list, &sources, &needed);
        let Loading { loaded, .. } = loading;
        if let Err(Stop::Lost(status)) = outcome {
            return Err(status);
        }
        if unloaded > 0 {
            tracing::info!("Unloaded {unloaded} images that clients do not use any more");
        }
        tracing::info!(
            "Loaded {loaded} images ahead, of {different} different ones in use, in {} ms; {} are loaded",
            began.elapsed().as_millis(),
            ahead.count
        );
        Ok(())
    }

    /// Unloads the images that were loaded ahead.
    ///
    /// # Errors
    /// The status with which the context was lost.
    pub fn unload_ahead(&self, ahead: &mut Ahead) -> Result<(), CUresult> {
        let on = (&self.driver, &self.devices);
        let count = ahead.reduce(on, &HashMap::new())?;
        tracing::info!("Unloaded {count} images that were loaded ahead: a client needs the memory");
        Ok(())
    }
}

impl Loading<'_> {
    /// How many instances of each image the sessions need. An image without a content stays as it is.
    fn needed(&mut self, list: &List, sources: &Sources) -> HashMap<Family, usize> {
        let is_listed = |family: &Family| list.places.contains_key(family);
        self.ahead.shared.retain(|family, _| is_listed(family));
        let hashes: HashSet<_> = list.places.keys().map(|family| family.hash).collect();
        self.ahead.calls.retain(|hash, _| hashes.contains(hash));
        let mut needed = HashMap::new();
        for wanted in &list.wanted {
            if (self.stop)() {
                // The sessions decide at the adoption.
                return self.as_loaded();
            }
            let times = match sources.get(&wanted.family.hash) {
                Some(source) => self.times(wanted, source.bytes()),
                None => wanted.times,
            };
            needed.insert(wanted.family.clone(), times);
        }
        needed
    }

    fn as_loaded(&self) -> HashMap<Family, usize> {
        let ready = self.ahead.ready.iter();
        ready
            .map(|(family, waiting)| (family.clone(), waiting.len()))
            .collect()
    }

    fn load_all(
        &mut self,
        list: &List,
        sources: &Sources,
        needed: &HashMap<Family, usize>,
    ) -> Result<(), Stop> {
        for wanted in &list.wanted {
            let Some(source) = sources.get(&wanted.family.hash) else {
                continue;
            };
            let needed = needed.get(&wanted.family).copied().unwrap_or(0);
            self.look_into(wanted, source.bytes().len())?;
            let there = self.ahead.ready.get(&wanted.family).map_or(0, Vec::len);
            for _ in there..needed {
                self.load(wanted, source)?;
            }
        }
        Ok(())
    }

    /// How many instances of an image the sessions need that may be loaded ahead.
    fn times(&mut self, wanted: &Wanted, content: &[u8]) -> usize {
        let Some((_, bytes)) = content.split_last() else {
            return 0;
        };
        let devices = &self.opened.devices;
        let archs: Vec<u32> = devices.iter().map(|device| device.capability).collect();
        let calls = self.ahead.calls.entry(wanted.family.hash);
        let calls = calls.or_insert_with(|| cubin::calls(bytes, &archs));
        if calls.prints || calls.allocates || calls.managed {
            return 0;
        }
        let is_shared = || wanted.family.keeps_nothing(devices, bytes);
        let shared = &mut self.ahead.shared;
        match wanted.times > 1
            && *shared
                .entry(wanted.family.clone())
                .or_insert_with(is_shared)
        {
            true => 1,
            false => wanted.times,
        }
    }

    /// Makes the driver load the libraries that are there on devices on which the sessions use them since.
    fn look_into(&mut self, wanted: &Wanted, len: usize) -> Result<(), Stop> {
        let Some(mut waiting) = self.ahead.ready.remove(&wanted.family) else {
            return Ok(());
        };
        let looked = waiting
            .iter_mut()
            .try_for_each(|one| self.realise(one, wanted, len));
        self.ahead.ready.insert(wanted.family.clone(), waiting);
        looked
    }

    fn load(&mut self, wanted: &Wanted, source: &Arc<Source>) -> Result<(), Stop> {
        let OpenDriver {
            driver, devices, ..
        } = self.opened;
        let family = &wanted.family;
        let device = match family.device {
            Some(device) => &devices[device],
            None => devices.first().ok_or(Stop::Enough)?,
        };
        self.enter(device, source.bytes().len())?;
        let Some(mut options) = family.jit_options() else {
            return Ok(());
        };
        let is_library = family.device.is_none();
        let raw = match load_raw(driver, is_library, source.bytes(), &mut options) {
            Ok(raw) => raw,
            Err(CUDA_ERROR_OUT_OF_MEMORY) => return Err(Stop::Enough),
            Err(status) if is_sticky(status) => return Err(Stop::Lost(status)),
            // The session gets the error.
            Err(_) => return Ok(()),
        };
        let said = options.outcome(0);
        let loaded = Loaded {
            raw,
            _options: Box::new(options),
            _source: Some(Arc::clone(source)),
        };
        let mut waiting = Waiting {
            loaded,
            said,
            looked_into: BTreeSet::new(),
        };
        let looked = self.realise(&mut waiting, wanted, source.bytes().len());
        let ready = self.ahead.ready.entry(family.clone()).or_default();
        ready.push(waiting);
        self.ahead.count += 1;
        self.loaded += 1;
        looked
    }

    /// Makes the driver load a library on the devices on which the sessions use it.
    fn realise(&self, waiting: &mut Waiting, wanted: &Wanted, len: usize) -> Result<(), Stop> {
        let Raw::Library(library) = waiting.loaded.raw else {
            return Ok(());
        };
        let driver = &self.opened.driver;
        for (number, name) in &wanted.functions {
            let Ok(device) = self.opened.devices.get(*number) else {
                continue;
            };
            if waiting.looked_into.contains(number) {
                continue;
            }
            self.enter(device, len)?;
            let (mut kernel, mut function) = (CUkernel::NULL, CUfunction::NULL);
            let found = driver
                .library_get_kernel(&mut kernel, library, name.as_ptr().cast())
                .and_then(|()| driver.kernel_get_function(&mut function, kernel));
            if let Err(status) = found
                && (status == CUDA_ERROR_OUT_OF_MEMORY || is_sticky(status))
            {
                return Err(status.into());
            }
            waiting.looked_into.insert(*number);
        }
        Ok(())
    }

    /// Makes a device's context current, if an image of `len` bytes may be loaded there now.
    fn enter(&self, device: &Device, len: usize) -> Result<(), Stop> {
        if (self.stop)() || Instant::now() >= self.until {
            return Err(Stop::Enough);
        }
        let driver = &self.opened.driver;
        device.attach(driver)?;
        device.make_current(driver)?;
        let (mut free, mut total) = (0, 0);
        driver.mem_get_info(&mut free, &mut total)?;
        match free as u64 >= (total as u64 / LEAST_FREE).saturating_add(len as u64) {
            true => Ok(()),
            false => Err(Stop::Enough),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::ordinal::Ordinal;
    use crate::engine::testing::{Fixture, Function, counts};
    use mpsshim_proto::handle::{Handle, Kind as HandleKind};
    use zerocopy::IntoBytes;

    fn family(hash: u8, options: u8) -> Family {
        Family {
            hash: [hash; 32],
            device: Some(Ordinal::of_test(0)),
            side: Side::MAIN,
            options: vec![options],
        }
    }

    fn ahead(families: &[Family]) -> Ahead {
        let mut ahead = Ahead::default();
        for (number, family) in (1..).zip(families) {
            let raw = Raw::Module(CUmodule(number));
            let loaded = Loaded::new(raw, JitOptions::default());
            let said = vec![number as u8];
            let ready = ahead.ready.entry(family.clone()).or_default();
            ready.push(Waiting {
                loaded,
                said,
                looked_into: BTreeSet::new(),
            });
            ahead.count += 1;
        }
        ahead
    }

    #[test]
    fn each_object_is_taken_once_by_an_equal_load_and_the_rest_are_unloaded() {
        let test = Fixture::new(&[("cuModuleUnload", counts as Function)]);
        let images = &test.shared.images;
        images.take_over(ahead(&[
            family(1, 0),
            family(1, 2),
            family(3, 0),
            family(3, 0),
        ]));
        let library = Family {
            device: None,
            ..family(1, 0)
        };
        for other in [family(2, 0), family(1, 1), library] {
            assert!(images.ahead.take(&other).is_none(), "{other:?}");
        }
        let of = (Some(HandleKind::Module), Some(&family(1, 2)));
        let (loaded, said) = images.load(of, b"text\0", JitOptions::default());
        let loaded = loaded.expect("an image");
        assert!(matches!(loaded.raw, Raw::Module(CUmodule(2))), "{loaded:?}");
        assert_eq!(said, [2]);
        assert!(images.ahead.take(&family(1, 2)).is_none(), "it is taken");
        let (again, _) = images.load(of, b"text\0", JitOptions::default());
        let again = again.expect("an image").raw;
        assert!(!matches!(again, Raw::Module(CUmodule(1..=4))), "{again:?}");
        images.end_unclaimed();
        assert_eq!(test.calls(), 3);
        assert!(images.ahead.take(&family(3, 0)).is_none());
        images.end_unclaimed();
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn images_that_are_not_used_any_more_are_unloaded() {
        let test = Fixture::new(&[("cuModuleUnload", counts as Function)]);
        let gpu = &test.shared.gpu;
        let on = (&gpu.driver, &gpu.devices);
        let mut ahead = ahead(&[family(1, 0), family(2, 0), family(2, 0), family(3, 0)]);
        let needed = HashMap::from([(family(1, 0), 1), (family(2, 0), 1), (family(4, 0), 1)]);
        assert_eq!(ahead.reduce(on, &needed), Ok(2));
        assert_eq!((test.calls(), ahead.count), (2, 2));
        let mut left: Vec<u8> = ahead.ready.keys().map(|family| family.hash[0]).collect();
        left.sort_unstable();
        assert_eq!(left, [1, 2]);
        assert_eq!(ahead.reduce(on, &needed), Ok(0));
        assert_eq!(ahead.reduce(on, &HashMap::new()), Ok(2));
        assert_eq!((test.calls(), ahead.count), (2, 0));
    }

    #[test]
    fn the_images_of_all_sessions_are_listed_with_the_functions_in_use() {
        let test = Fixture::new(&[]);
        let devices = &test.shared.gpu.devices;
        let record =
            |op: Op, bytes: &[u8]| Record::of(kinds::Kind::Makes, op as u16, 1, &bytes.to_vec());
        let image = |kind, number: u32, hash: u8, log: u32| {
            let body = ImageLoad {
                image: Handle::new(kind, 1, number).0,
                hash: [hash; 32],
                error_log: log,
                ..ImageLoad::default()
            };
            (body.image, record(Op::ImageLoad, body.as_bytes()))
        };
        let function = |parent, name: &[u8]| {
            let body = GetFunction {
                parent,
                function: 1,
                device: 0,
                pad: 0,
            };
            record(Op::GetFunction, &[body.as_bytes(), name].concat())
        };
        let (module, load_module) = image(HandleKind::Module, 1, 1, 0);
        let (library, load_library) = image(HandleKind::Library, 1, 1, 0);
        let (logged, load_logged) = image(HandleKind::Module, 2, 2, 9);
        let mut list = List::default();
        let first = [
            load_module.clone(),
            load_logged,
            load_library,
            function(library, b"first\0"),
            function(library, b"second\0"),
            function(logged, b"third\0"),
        ];
        list.add(devices, &first);
        list.add(
            devices,
            &[load_module, function(module, b"cut"), function(7, b"x\0")],
        );
        let listed = list.wanted.iter();
        let listed: Vec<_> = listed
            .map(|one| (one.family.device.is_some(), one.times, &one.functions))
            .collect();
        let functions = BTreeMap::from([(0, b"first\0".to_vec())]);
        assert_eq!(
            listed,
            [(true, 2, &BTreeMap::new()), (false, 1, &functions)]
        );
    }
}
