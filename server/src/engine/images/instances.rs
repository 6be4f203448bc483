//! Instances of modules and libraries in the driver, and how clients share them.
//!
//! An image whose kernels keep no state between launches ([`crate::engine::gpu::cubin`]) is loaded once for all clients
//! that load the same content with the same options. A driver function, however, has attributes that a client may set,
//! so clients share a function of an instance only while they set equal attributes; a client that sets others uses the
//! function of another instance. A function takes on a client's attributes when the client first uses it, so clients
//! that set attributes before their first launch can still share. A client that asks for a variable gets a private
//! instance.

use crate::engine::base::account::Charge;
use crate::engine::base::jit::JitOptions;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::cubin::{Calls, Leaves};
use crate::engine::images::ahead::{self, Loaded};
use crate::engine::images::contents::{Content, Raw};
use crate::engine::images::family::Family;
use crate::engine::images::residents::Counted;
use crate::engine::images::variables::{AsLoaded, Variables};
use crate::engine::images::{ImageStore, Unloading};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size limit for loading an image ahead of its first use, bytes: large libraries contain many kernels and use few.
const AHEAD_MOST: usize = 1 << 20;

/// A kernel's name including its NUL, and the server's ordinal of the device.
pub type Key = (Box<[u8]>, Ordinal);
/// Initial contents of the variables by device; `None` if unknown.
type Before = BTreeMap<Ordinal, Option<Arc<AsLoaded>>>;
/// Function attributes set by clients.
type Attributes = BTreeMap<CUfunction_attribute, i32>;

/// A module or library in the driver.
#[derive(Debug)]
pub struct Instance {
    /// The driver's object.
    pub raw: Raw,
    /// Server's ordinal; meaningless for a library, which is loaded for all devices.
    pub device: Ordinal,
    /// Side that it is loaded on.
    pub side: Side,
    /// Its family, if clients may share it.
    family: Option<Family>,
    /// Kept for as long as the driver may read it.
    content: Content,
    /// The variables that clients can change; `None` if they cannot be determined.
    variables: Variables,
    /// With the load options and the log buffers they point to: the driver compiles a library at its first use, and does
    /// not document when it stops referring to them.
    _loaded: Loaded,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Reserved for a single image.
    closed: bool,
    functions: HashMap<Key, Use>,
    /// Driver functions looked up so far; a second look-up does not block.
    found: HashMap<Key, CUfunction>,
    /// Devices for which all functions were looked up.
    looked_ahead: HashSet<Ordinal>,
    /// Number of images that use this instance. Each pays for it.
    payers: usize,
    /// The last payer's charge, until the driver has unloaded the instance or it is kept for other clients.
    owed: Option<Charge>,
    /// Counts it among the evicted residents until the driver has unloaded it.
    counted: Option<Counted>,
    /// Contents of its variables at load time, by device; `None` if unknown.
    before: Before,
    /// A client made a change to it that cannot be reverted.
    altered: bool,
    /// Everything that its last client had in flight has completed.
    drained: bool,
}

/// Users and attributes of one function of an instance.
#[derive(Debug, Default)]
struct Use {
    /// Ids of the images that use it.
    by: HashSet<u64>,
    set: Attributes,
    /// Attribute values from before the first client set them.
    usual: Attributes,
}

impl Instance {
    fn new(
        store: &ImageStore,
        (loaded, device): (Loaded, Ordinal),
        family: Option<Family>,
        content: &Content,
    ) -> Arc<Instance> {
        let raw = loaded.raw;
        store.families.count(side::entered());
        let variables = store.variables_of(content.hash(), content);
        let instance = Arc::new(Instance {
            raw,
            device,
            side: side::entered(),
            family,
            content: content.clone(),
            variables,
            _loaded: loaded,
            state: Mutex::default(),
        });
        if let Raw::Module(_) = raw {
            instance.note_loaded(store, device);
        }
        instance
    }

    /// Notes that the driver has loaded it on a device, now or earlier, and saves the initial contents of its
    /// variables.
    pub fn note_loaded(&self, store: &ImageStore, device: Ordinal) {
        self.remember(store, &mut self.state.lock().before, device);
    }

    fn remember(&self, store: &ImageStore, before: &mut Before, device: Ordinal) {
        before.entry(device).or_insert_with(|| {
            let variables = self.variables.as_ref()?;
            let read = AsLoaded::read(&store.gpu, self.raw, device, variables);
            read.inspect_err(
                |status| tracing::debug!(%status, "variables of an image were not read"),
            )
            .ok()
            .map(Arc::new)
        });
    }

    /// Restores the initial contents of its variables for the next client. Returns whether that removed all state of
    /// the last client. No client may be using the instance.
    pub fn renew(&self, store: &ImageStore) -> bool {
        let mut state = self.state.lock();
        if !state.may_be_renewed() {
            return false;
        }
        let put_back = state.before.iter().all(|(device, before)| {
            let before = before.as_ref();
            before.is_some_and(|before| before.put_back(&store.gpu, *device).is_ok())
        });
        if put_back {
            state.closed = false;
        }
        put_back
    }

    /// Whether the state left by its clients can be reverted.
    pub fn may_be_renewed(&self) -> bool {
        self.state.lock().may_be_renewed()
    }

    /// Initial contents of its variables on a device, if known.
    fn as_loaded(&self, device: Ordinal) -> Option<Arc<AsLoaded>> {
        self.state.lock().before.get(&device)?.clone()
    }

    /// Notes a change that cannot be reverted.
    pub fn note_altered(&self) {
        self.state.lock().altered = true;
    }

    /// Whether new clients may share it.
    pub fn is_open(&self) -> bool {
        !self.state.lock().closed
    }

    /// Reserves it for a single client from now on.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Its family, if clients may share it.
    pub fn family(&self) -> Option<&Family> {
        self.family.as_ref()
    }

    /// The content it was loaded from.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// Looks up a function to query it.
    ///
    /// # Errors
    /// Driver errors.
    pub fn function(&self, store: &ImageStore, key: &Key) -> Result<CUfunction, CUresult> {
        let mut state = self.state.lock();
        let State { found, before, .. } = &mut *state;
        self.find(store, (found, before), key)
    }

    fn find(
        &self,
        store: &ImageStore,
        (found, before): (&mut HashMap<Key, CUfunction>, &mut Before),
        key: &Key,
    ) -> Result<CUfunction, CUresult> {
        if let Some(known) = found.get(key) {
            return Ok(*known);
        }
        let (name, device) = key;
        let driver = &store.gpu.driver;
        store.gpu.devices[*device].make_current(driver)?;
        let mut function = CUfunction::NULL;
        let name = name.as_ptr().cast();
        match self.raw {
            Raw::Module(module) => driver.module_get_function(&mut function, module, name)?,
            Raw::Library(library) => {
                let mut kernel = CUkernel::NULL;
                driver.library_get_kernel(&mut kernel, library, name)?;
                driver.kernel_get_function(&mut function, kernel)?;
                self.remember(store, before, *device);
            }
        }
        found.insert(key.clone(), function);
        Ok(function)
    }

    fn knows(&self, key: &Key) -> bool {
        self.state.lock().found.contains_key(key)
    }

    /// Whether the driver has loaded it. The driver loads a library when one of its functions is first looked up.
    fn is_loaded(&self) -> bool {
        matches!(self.raw, Raw::Module(_)) || !self.state.lock().found.is_empty()
    }

    /// Makes the driver load a library none of whose functions was looked up yet, if `may` allows it.
    fn load_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        let mut state = self.state.lock();
        let loaded = state.before.contains_key(&device) || !state.found.is_empty();
        if loaded || self.content.len() > AHEAD_MOST || !may() {
            return;
        }
        let names = self.names(store).unwrap_or_default();
        if let Some(name) = names.first() {
            let key = (name.to_bytes_with_nul().into(), device);
            let State { found, before, .. } = &mut *state;
            // If this fails, the client gets the error when it asks for the function.
            let _ = self.find(store, (found, before), &key);
        }
    }

    /// Looks up its functions ahead of their use, for as long as `may` allows it.
    fn look_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        let mut state = self.state.lock();
        let long = state.found.is_empty() && self.content.len() > AHEAD_MOST;
        if long || !may() || !state.looked_ahead.insert(device) {
            return;
        }
        for name in self.names(store).unwrap_or_default() {
            if !may() {
                return;
            }
            let key = (name.to_bytes_with_nul().into(), device);
            // If this fails, the client gets the error when it asks for the function.
            let State { found, before, .. } = &mut *state;
            let Ok(function) = self.find(store, (found, before), &key) else {
                continue;
            };
            let mut local = 0;
            let attribute = CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
            let known = store
                .gpu
                .driver
                .func_get_attribute(&mut local, attribute, function);
            if known.is_ok() {
                store.gpu.devices[device].want_local_ahead(local.max(0) as u32);
            }
        }
    }

    /// Names of its kernels, valid for as long as the instance.
    fn names(&self, store: &ImageStore) -> Result<Vec<&CStr>, CUresult> {
        let driver = &store.gpu.driver;
        let mut count = 0;
        let mut names: Vec<*const c_char> = Vec::new();
        match self.raw {
            Raw::Module(module) => {
                driver.module_get_function_count(&mut count, module)?;
                let mut functions = vec![CUfunction::NULL; count as usize];
                driver.module_enumerate_functions(functions.as_mut_ptr(), count, module)?;
                for function in functions {
                    let mut name = std::ptr::null();
                    driver.func_get_name(&mut name, function)?;
                    names.push(name);
                }
            }
            Raw::Library(library) => {
                driver.library_get_kernel_count(&mut count, library)?;
                let mut kernels = vec![CUkernel::NULL; count as usize];
                driver.library_enumerate_kernels(kernels.as_mut_ptr(), count, library)?;
                for kernel in kernels {
                    let mut name = std::ptr::null();
                    driver.kernel_get_name(&mut name, kernel)?;
                    names.push(name);
                }
            }
        }
        let names = names.into_iter().filter(|name| !name.is_null());
        // SAFETY: the driver's names are NUL-terminated and live as long as the module or library.
        Ok(names.map(|name| unsafe { CStr::from_ptr(name) }).collect())
    }

    /// Assigns a function with these attributes to an image; `None` if other images use the function with other
    /// attributes.
    fn take(
        &self,
        store: &ImageStore,
        image: u64,
        key: &Key,
        wanted: &Attributes,
    ) -> Option<Result<CUfunction, CUresult>> {
        let mut state = self.state.lock();
        let State {
            functions,
            found,
            before,
            ..
        } = &mut *state;
        let used = functions.entry(key.clone()).or_default();
        if used.set != *wanted && used.by.iter().any(|user| *user != image) {
            return None;
        }
        let found = self.find(store, (found, before), key);
        let taken = found.and_then(|function| {
            if used.set != *wanted {
                used.change(store, function, wanted)?;
            }
            used.by.insert(image);
            Ok(function)
        });
        Some(taken)
    }

    /// Adds an image that uses the instance and pays for it.
    fn join(&self) {
        let mut state = self.state.lock();
        state.payers += 1;
        state.drained = false;
        (state.owed, state.counted) = (None, None);
    }

    /// Removes an image, with the charge it paid and whether all its work has drained.
    fn part(&self, image: u64, paid: Option<Charge>, drained: bool) {
        self.leave(image, |_| true);
        let mut state = self.state.lock();
        state.payers = state.payers.saturating_sub(1);
        if state.payers == 0 {
            state.drained = drained;
            state.owed = paid;
            if let Some(owed) = &mut state.owed {
                owed.leave();
            }
        }
    }

    /// Drops its charges, because it is kept for other clients.
    pub fn forgive(&self) {
        let mut state = self.state.lock();
        (state.owed, state.counted) = (None, None);
    }

    /// Counts it as an evicted resident if no image uses it.
    pub fn count(&self, counted: Counted) {
        let mut state = self.state.lock();
        if state.payers == 0 {
            state.counted = Some(counted);
        }
    }

    /// Whether an image may use a function with these attributes.
    fn suits(&self, image: u64, key: &Key, wanted: &Attributes) -> bool {
        let state = self.state.lock();
        state
            .functions
            .get(key)
            .is_none_or(|used| used.set == *wanted || !used.by.iter().any(|user| *user != image))
    }

    fn leave(&self, image: u64, which: impl Fn(&Key) -> bool) {
        for (key, used) in self.state.lock().functions.iter_mut() {
            if which(key) {
                used.by.remove(&image);
            }
        }
    }

    /// Unloads it (`cuModuleUnload` or `cuLibraryUnload`).
    pub fn end(self, store: &ImageStore) {
        side::enter(self.side);
        let _ = store.gpu.devices[self.device].make_current(&store.gpu.driver);
        if let Err(status) = ahead::unload(&store.gpu.driver, self.raw) {
            store.gpu.note_status(status);
        }
        store.families.discount(self.side);
    }
}

impl State {
    fn may_be_renewed(&self) -> bool {
        let known = self.before.values().all(Option::is_some);
        known && self.drained && !self.altered && self.payers == 0
    }
}

impl Use {
    fn change(
        &mut self,
        store: &ImageStore,
        function: CUfunction,
        wanted: &Attributes,
    ) -> Result<(), CUresult> {
        let driver = &store.gpu.driver;
        for (attribute, value) in wanted {
            if !self.usual.contains_key(attribute) {
                let mut before = 0;
                driver.func_get_attribute(&mut before, *attribute, function)?;
                self.usual.insert(*attribute, before);
            }
            if self.set.get(attribute) != Some(value) {
                driver.func_set_attribute(function, *attribute, *value)?;
                self.set.insert(*attribute, *value);
            }
        }
        for attribute in self.set.keys().filter(|set| !wanted.contains_key(set)) {
            if let Some(before) = self.usual.get(attribute) {
                driver.func_set_attribute(function, *attribute, *before)?;
            }
        }
        self.set = wanted.clone();
        Ok(())
    }
}

/// An image's attributes and instance for one function.
#[derive(Debug, Default)]
struct Chosen {
    /// Set for the kernel and for the function; the function's values take precedence.
    of_kernel: Attributes,
    of_function: Attributes,
    /// Index of the instance, once the function was used.
    instance: Option<usize>,
}

impl Chosen {
    fn set_for(&mut self, kernel: bool) -> &mut Attributes {
        if kernel {
            &mut self.of_kernel
        } else {
            &mut self.of_function
        }
    }

    fn wanted(&self) -> Attributes {
        let mut wanted = self.of_kernel.clone();
        wanted.extend(&self.of_function);
        wanted
    }
}

/// The instance from which an image takes a function.
enum Picked {
    /// One of the image's own instances, by index.
    Own(usize),
    /// An instance of other clients.
    Others(Arc<Instance>),
}

/// A module or library of a session.
#[derive(Debug)]
pub struct Image {
    /// Unique in the server's lifetime.
    id: u64,
    /// Instances of its functions. Variables are looked up in the first.
    instances: Vec<Arc<Instance>>,
    /// Its family; `None` once it has a private instance.
    family: Option<Family>,
    /// Its encoded JIT options; `None`: it cannot be loaded again, since it must not be shared.
    options: Option<Vec<u8>>,
    /// Attributes go through [`Image::set`] because the image belongs, or belonged, to a family.
    tracked: bool,
    content: Content,
    chosen: HashMap<Key, Chosen>,
    /// Server's ordinal; meaningless for a library.
    pub device: Ordinal,
    /// Functions of the driver that its kernels call.
    pub calls: Calls,
    /// Address and bytes of its managed variables, which are in the session's memory.
    pub managed: HashMap<CString, (u64, u64)>,
    /// Charge for its instances on the device; split among them when the session leaves the image.
    charge: Option<Charge>,
    /// Charge for each instance, bytes.
    each: u64,
    /// [`Image::retire`] has already offered its instances to other clients.
    retired: bool,
    /// Everything that the session had in flight has completed.
    drained: bool,
}

static NEXT_IMAGE: AtomicU64 = AtomicU64::new(1);

/// Releases a reference to an instance; the last release passes it to [`crate::engine::images::residents`]. Do not drop
/// a reference in any other way.
pub fn let_go(store: &ImageStore, instance: Arc<Instance>) {
    if let Some(last) = Arc::into_inner(instance) {
        store.bury(Unloading::Left(last));
    }
}

impl Image {
    /// Loads an image for a session, or shares an instance that is already loaded. `family` is `None` for an image that
    /// must not be shared. Returns the image or the driver's error, and the encoded outcome of the JIT options.
    pub fn load(
        store: &ImageStore,
        handle: u64,
        (content, device, calls): (Content, Ordinal, Calls),
        (family, offered): (Option<Family>, Option<Arc<Instance>>),
        options: JitOptions,
    ) -> (Result<Image, CUresult>, Vec<u8>) {
        let family = family.filter(|_| !calls.prints);
        let found = match (&family, offered) {
            (Some(family), Some(offered)) if offered.family() == Some(family) => {
                store.residents.take(&offered);
                Some(offered)
            }
            (family, offered) => {
                if let Some(offered) = offered {
                    let_go(store, offered);
                }
                let family = family.as_ref();
                family.and_then(|family| store.families.another(store, family))
            }
        };
        tracing::debug!(
            bytes = content.len(),
            "an image: {}",
            if found.is_some() {
                "another client's"
            } else {
                "loaded"
            }
        );
        let (instance, said) = match found {
            Some(instance) => (instance, options.outcome(0)),
            None => {
                let of = (Handle(handle).kind(), family.as_ref());
                let (loaded, said) = store.load(of, &content, options);
                let loaded = match loaded {
                    Ok(loaded) => loaded,
                    Err(status) => return (Err(status), said),
                };
                let instance = Instance::new(store, (loaded, device), family.clone(), &content);
                store.families.add(&instance);
                (instance, said)
            }
        };
        let image = Image {
            id: NEXT_IMAGE.fetch_add(1, Ordering::Relaxed),
            instances: vec![instance],
            tracked: family.is_some(),
            options: family.as_ref().map(|family| family.options.clone()),
            family,
            content,
            chosen: HashMap::new(),
            device,
            calls,
            managed: HashMap::new(),
            charge: None,
            each: 0,
            retired: false,
            drained: false,
        };
        image.instances[0].join();
        (Ok(image), said)
    }

    /// Takes over the charge for the first instance.
    pub fn pay(&mut self, charge: Charge) {
        self.each = charge.bytes();
        self.charge = Some(charge);
    }

    /// Marks the charge as left: the client has unloaded the image.
    pub fn leave_charge(&mut self) {
        if let Some(charge) = &mut self.charge {
            charge.leave();
        }
    }

    /// Adds the charge for one more instance.
    fn pay_for_another(&mut self) -> Result<(), CUresult> {
        let each = self.each;
        let charge = self.charge.as_mut();
        charge.map_or(Ok(()), |charge| charge.resize(charge.bytes() + each))
    }

    /// Splits off the charge for one instance.
    fn part_of_charge(&mut self) -> Option<Charge> {
        let each = self.each;
        self.charge.as_mut().map(|charge| charge.split(each))
    }

    /// Side that it is loaded on.
    pub fn side(&self) -> Side {
        self.instances[0].side
    }

    /// Notes that everything the session had in flight has completed.
    pub fn note_drained(&mut self) {
        self.drained = true;
    }

    /// Notes that the driver has loaded the first instance, where names are looked up, on a device.
    pub fn note_loaded(&self, store: &ImageStore, device: Ordinal) {
        self.instances[0].note_loaded(store, device);
    }

    /// Initial contents of the session's private variables on a device; `None` if unknown.
    pub fn variables(&self, device: Ordinal) -> Option<Arc<AsLoaded>> {
        // With several shared instances it is not known which one holds the variables.
        let is_one = self.family.is_none() || self.instances.len() == 1;
        self.instances[0].as_loaded(device).filter(|_| is_one)
    }

    /// First address and bytes of each known variable.
    pub fn places(&self) -> Vec<(u64, u64)> {
        let state = self.instances[0].state.lock();
        let known = state.before.values().flatten();
        known.flat_map(|variables| variables.places()).collect()
    }

    /// Notes that the session makes a change that cannot be reverted.
    pub fn note_altered(&self) {
        self.instances[0].note_altered();
    }

    /// Whether the image can be reloaded elsewhere without its client noticing, judged without reading the content: in
    /// a loaded image, kernels may have changed variables.
    pub fn may_move(&self, store: &ImageStore) -> bool {
        let family = self.family.as_ref();
        !self.is_loaded() || family.is_some_and(|family| store.families.may_keep_nothing(family))
    }

    /// Whether kernels that already ran can continue with a reloaded image, and data they left in memory stays valid
    /// with it: the code writes no variables and stores no addresses of its own. Takes time.
    pub fn is_as_new(&self, store: &ImageStore) -> bool {
        !self.is_loaded() || store.leaves(&self.content) == Leaves::default()
    }

    /// The content it was loaded from.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The driver's object for looking up names.
    pub fn raw(&self) -> Raw {
        self.instances[0].raw
    }

    /// Whether its functions are obtained by [`Image::take`] and their attributes set by [`Image::set`].
    pub fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Whether other clients may share its instances.
    pub fn may_be_shared(&self) -> bool {
        self.family.is_some()
    }

    /// Whether its instances are, or were, shared, so that a private instance requires another load.
    pub fn is_with_others(&self) -> bool {
        self.family.is_some()
            && !matches!(&self.instances[..], [only] if Arc::strong_count(only) == 1)
    }

    /// Looks up a function to query it before its first use.
    pub fn look(&self, store: &ImageStore, key: &Key) -> Result<CUfunction, CUresult> {
        self.of(key).function(store, key)
    }

    /// Whether a function was looked up before, so that another look-up does not block.
    pub fn knows(&self, key: &Key) -> bool {
        self.of(key).knows(key)
    }

    /// Whether the driver has loaded the first instance, where names are looked up.
    pub fn is_loaded(&self) -> bool {
        self.instances[0].is_loaded()
    }

    /// Makes the driver load a library none of whose functions was looked up yet, if `may` allows it.
    pub fn load_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        self.instances[0].load_ahead(store, device, may);
    }

    /// Looks up its functions ahead of their use, for as long as `may` allows it.
    pub fn look_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        self.instances[0].look_ahead(store, device, may);
    }

    /// Names of its kernels.
    ///
    /// # Errors
    /// Driver errors.
    pub fn names(&self, store: &ImageStore) -> Result<Vec<&CStr>, CUresult> {
        self.instances[0].names(store)
    }

    /// The instance of a function.
    fn of(&self, key: &Key) -> &Instance {
        let at = self.chosen.get(key).and_then(|chosen| chosen.instance);
        &self.instances[at.unwrap_or(0)]
    }

    /// Replaces attribute values set by other clients with the session's own or with the initial ones.
    pub fn correct(&self, key: &Key, attributes: &mut [i32]) {
        let chosen = self.chosen.get(key);
        let at = chosen.and_then(|chosen| chosen.instance).unwrap_or(0);
        let state = self.instances[at].state.lock();
        let usual = state.functions.get(key).map(|used| &used.usual);
        let own = chosen.map(Chosen::wanted);
        for (attribute, value) in usual.into_iter().flatten().chain(own.iter().flatten()) {
            if let Some(place) = attributes.get_mut(*attribute as usize) {
                *place = *value;
            }
        }
    }

    /// Picks an instance that can provide a function with these attributes. Prefers the instance in use, then the
    /// image's other instances, then those of other clients; the latter only if the image's kernels keep no state. With
    /// `known`, picks only an instance in which the function was already looked up, so that the driver does not block.
    fn pick(
        &self,
        store: &ImageStore,
        key: &Key,
        wanted: &Attributes,
        known: bool,
    ) -> Option<Picked> {
        let fits = |one: &Instance| (!known || one.knows(key)) && one.suits(self.id, key, wanted);
        // A separated image keeps its variables in the first instance; the others remain only for work in flight.
        let own = match self.family {
            Some(_) => &self.instances[..],
            None => &self.instances[..1],
        };
        let here = self.chosen.get(key).and_then(|chosen| chosen.instance);
        let mut order = here.into_iter().chain(0..own.len());
        if let Some(at) = order.find(|at| own.get(*at).is_some_and(|one| fits(one))) {
            return Some(Picked::Own(at));
        }
        let family = self.family.as_ref()?;
        if !store.families.is_known_to_keep_nothing(family) {
            return None;
        }
        let mut picked = None;
        for other in store.families.all(store, family) {
            let is_own = own.iter().any(|one| Arc::ptr_eq(one, &other));
            if picked.is_none() && !is_own && fits(&other) {
                picked = Some(other);
            } else {
                let_go(store, other);
            }
        }
        picked.map(Picked::Others)
    }

    /// Returns the function that the session uses from now on. Blocks for a look-up or another load where
    /// [`Image::loads_to_take`] says so.
    ///
    /// # Errors
    /// Driver errors.
    pub fn take(&mut self, store: &ImageStore, key: &Key) -> Result<CUfunction, CUresult> {
        let wanted = self.chosen.entry(key.clone()).or_default().wanted();
        for known in [true, false] {
            let picked = self.pick(store, key, &wanted, known);
            // Another client may have taken it first.
            let taken = picked.and_then(|picked| self.take_from(store, picked, key, &wanted));
            if let Some(taken) = taken {
                return taken;
            }
        }
        let more = self.load_another(store, self.family.clone())?;
        store.families.add(&more);
        let at = self.instances.len();
        self.instances.push(more);
        self.take_from(store, Picked::Own(at), key, &wanted)
            .unwrap_or(Err(CUDA_ERROR_UNKNOWN))
    }

    fn take_from(
        &mut self,
        store: &ImageStore,
        picked: Picked,
        key: &Key,
        wanted: &Attributes,
    ) -> Option<Result<CUfunction, CUresult>> {
        let (at, taken) = match picked {
            Picked::Own(at) => (at, self.instances[at].take(store, self.id, key, wanted)?),
            Picked::Others(other) => {
                if let Err(status) = self.pay_for_another() {
                    let_go(store, other);
                    return Some(Err(status));
                }
                let Some(taken) = other.take(store, self.id, key, wanted) else {
                    drop(self.part_of_charge());
                    let_go(store, other);
                    return None;
                };
                store.residents.take(&other);
                other.join();
                self.instances.push(other);
                (self.instances.len() - 1, taken)
            }
        };
        self.chosen.entry(key.clone()).or_default().instance = Some(at);
        Some(taken)
    }

    /// Whether [`Image::take`], or [`Image::set`] of an attribute of the kernel or the function, makes the driver load
    /// an image or look up a function for the first time, which stalls other clients too.
    pub fn loads_to_take(
        &self,
        store: &ImageStore,
        key: &Key,
        set: Option<((CUfunction_attribute, i32), bool)>,
    ) -> bool {
        let chosen = self.chosen.get(key);
        let mut wanted = chosen.map(Chosen::wanted).unwrap_or_default();
        if let Some(((attribute, value), of_kernel)) = set {
            let hidden = chosen
                .is_some_and(|chosen| of_kernel && chosen.of_function.contains_key(&attribute));
            if !hidden {
                wanted.insert(attribute, value);
            }
        }
        match self.pick(store, key, &wanted, true) {
            Some(Picked::Others(other)) => let_go(store, other),
            Some(Picked::Own(_)) => {}
            None => return true,
        }
        false
    }

    /// Loads another instance, for which the image pays as for the first.
    fn load_another(
        &mut self,
        store: &ImageStore,
        family: Option<Family>,
    ) -> Result<Arc<Instance>, CUresult> {
        self.pay_for_another()?;
        let more = self.load_again(store, family);
        match &more {
            Ok(more) => more.join(),
            Err(_) => drop(self.part_of_charge()),
        }
        more
    }

    fn load_again(
        &self,
        store: &ImageStore,
        family: Option<Family>,
    ) -> Result<Arc<Instance>, CUresult> {
        tracing::debug!(bytes = self.content.len(), "an image: loaded once more");
        let kind = match self.raw() {
            Raw::Module(_) => Kind::Module,
            Raw::Library(_) => Kind::Library,
        };
        store.gpu.devices[self.device].make_current(&store.gpu.driver)?;
        let options = self.options.as_deref().unwrap_or_default();
        let count = options.first().copied().unwrap_or(0);
        let options = JitOptions::read(options.get(1..).unwrap_or(&[]), count.into())
            .map_or_else(|_| JitOptions::default(), |(options, _)| options);
        let (loaded, _) = store.load((Some(kind), family.as_ref()), &self.content, options);
        let of = (loaded?, self.device);
        Ok(Instance::new(store, of, family, &self.content))
    }

    /// Sets an attribute for this session only. Returns the function, which may now belong to another instance.
    pub fn set(
        &mut self,
        store: &ImageStore,
        key: &Key,
        (attribute, value): (CUfunction_attribute, i32),
        of_kernel: bool,
    ) -> Result<CUfunction, CUresult> {
        let chosen = self.chosen.entry(key.clone()).or_default();
        let table = chosen.set_for(of_kernel);
        let before = table.insert(attribute, value);
        let left = chosen.instance;
        match self.take(store, key) {
            Ok(function) => {
                let now = self.chosen.get(key).and_then(|chosen| chosen.instance);
                if let Some(left) = left.filter(|left| Some(*left) != now) {
                    self.instances[left].leave(self.id, |other| other == key);
                }
                Ok(function)
            }
            Err(status) => {
                let chosen = self.chosen.entry(key.clone()).or_default();
                chosen.instance = left;
                let table = chosen.set_for(of_kernel);
                match before {
                    Some(before) => table.insert(attribute, before),
                    None => table.remove(&attribute),
                };
                Err(status)
            }
        }
    }

    /// Value of an attribute that the session set for a kernel.
    pub fn of_kernel(&self, key: &Key, attribute: CUfunction_attribute) -> Option<i32> {
        self.chosen.get(key)?.of_kernel.get(&attribute).copied()
    }

    /// Gives the image a private instance, which holds its variables from now on. Returns whether its functions
    /// changed.
    pub fn separate(&mut self, store: &ImageStore) -> Result<bool, CUresult> {
        let Some(family) = &self.family else {
            return Ok(false);
        };
        store.families.note_asked(family);
        if let [only] = &self.instances[..] {
            let mut state = only.state.lock();
            // A client about to share it already holds a reference.
            if Arc::strong_count(only) == 1 {
                state.closed = true;
                drop(state);
                self.family = None;
                return Ok(false);
            }
        }
        self.load_elsewhere(store)?;
        Ok(true)
    }

    /// Gives the image another private instance, which holds its variables from now on, at other addresses: the present
    /// instances stay until the image is unloaded.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for an image that cannot be loaded again; driver errors.
    pub fn load_elsewhere(&mut self, store: &ImageStore) -> Result<(), CUresult> {
        if self.options.is_none() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let own = self.load_another(store, self.family.clone())?;
        own.close();
        for other in &self.instances {
            other.leave(self.id, |_| true);
        }
        // Graphs and work in flight still use the other instances.
        self.instances.insert(0, own);
        self.family = None;
        let keys: Vec<Key> = self.chosen.keys().cloned().collect();
        for key in keys {
            self.chosen.entry(key.clone()).or_default().instance = None;
            self.take(store, &key)?;
        }
        Ok(())
    }

    /// Loads the image on the side that the calling thread has entered, or shares an instance there.
    ///
    /// # Errors
    /// Driver errors.
    pub fn load_there(&self, store: &ImageStore) -> Result<Arc<Instance>, CUresult> {
        let family = self.family.clone().map(|mut family| {
            family.side = side::entered();
            family
        });
        let found = family
            .as_ref()
            .and_then(|family| store.families.another(store, family));
        if let Some(found) = found {
            return Ok(found);
        }
        let own = self.load_again(store, family)?;
        store.families.add(&own);
        Ok(own)
    }

    /// Replaces its instances with one on another side. The image must not be using any of their functions. The calling
    /// thread has entered the side of the old instances.
    pub fn move_to(&mut self, store: &ImageStore, to: Side, instance: Arc<Instance>) {
        instance.join();
        for (n, old) in std::mem::replace(&mut self.instances, vec![instance])
            .into_iter()
            .enumerate()
        {
            // It keeps paying for one instance.
            let paid = if n == 0 { None } else { self.part_of_charge() };
            old.part(self.id, paid, false);
            let_go(store, old);
        }
        for chosen in self.chosen.values_mut() {
            chosen.instance = None;
        }
        if let Some(family) = &mut self.family {
            family.side = to;
        }
    }

    /// Discards function attributes on a device, because the session's context there has ended.
    pub fn leave(&mut self, device: Ordinal) {
        for instance in &self.instances {
            instance.leave(self.id, |(_, of)| *of == device);
        }
        for ((_, of), chosen) in &mut self.chosen {
            if *of == device {
                chosen.of_function.clear();
                chosen.instance = None;
            }
        }
    }

    /// Leaves the instances that are shared with other clients. Returns the image if it has private ones.
    pub fn leave_shared(mut self, store: &ImageStore) -> Option<Image> {
        let others_have = |instance: &mut Arc<Instance>| Arc::strong_count(instance) > 1;
        let left: Vec<_> = self.instances.extract_if(.., others_have).collect();
        for instance in left {
            instance.part(self.id, self.part_of_charge(), false);
            // The other clients may have left meanwhile.
            let_go(store, instance);
        }
        (!self.instances.is_empty()).then_some(self)
    }

    /// Offers instances that only this session used to future clients. Returns the image if any must be unloaded.
    pub fn retire(mut self, store: &ImageStore) -> Option<Image> {
        if !self.retired {
            self.retired = true;
            for instance in std::mem::take(&mut self.instances) {
                instance.part(self.id, self.part_of_charge(), self.drained);
                self.instances.extend(store.assess(instance));
            }
        }
        (!self.instances.is_empty()).then_some(self)
    }

    /// Ends the session's use and unloads the instances that no other client uses.
    pub fn end(self, store: &ImageStore) {
        for instance in self.instances {
            instance.leave(self.id, |_| true);
            if let Some(last) = Arc::into_inner(instance) {
                last.end(store);
            }
        }
    }
}
