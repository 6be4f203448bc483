//! Modules and libraries in the driver, and which clients have them together.
//!
//! What kernels keep nothing between launches ([`crate::engine::gpu::cubin`]) needs to be loaded once for all clients that load the
//! same content with the same options. The driver's functions have attributes, though, which a client may set: a
//! function of an instance is used together by clients that set the same; one that sets something else uses the
//! function of another instance. A function has taken a client's attributes when the client first uses it, so that
//! clients which set attributes before they launch come together. A client that asks for a variable gets an instance
//! of its own.

use crate::engine::base::account::Charge;
use crate::engine::base::jit::JitOptions;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::cubin;
use crate::engine::images::contents::{Content, Raw};
use crate::engine::images::families::Family;
use crate::engine::images::residents::Counted;
use crate::engine::images::variables::{AsLoaded, Variables};
use crate::engine::images::{ImageStore, Unloading};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A longer image is not loaded before something of it is wanted, bytes: large libraries have many, and use few.
const AHEAD_MOST: usize = 1 << 20;

/// A kernel's name, its NUL included, and the server's ordinal of a device.
pub type Key = (Box<[u8]>, Ordinal);
/// What variables held at first, by device; `None` where that is not known.
type Before = BTreeMap<Ordinal, Option<Arc<AsLoaded>>>;
/// Attributes of a function that were set.
type Attributes = BTreeMap<CUfunction_attribute, i32>;

/// A module or library in the driver.
#[derive(Debug)]
pub struct Instance {
    /// The driver's object.
    pub raw: Raw,
    /// Server's ordinal; of no meaning for a library, which is there for all devices.
    pub device: Ordinal,
    /// Where it is loaded.
    pub side: Side,
    /// Of which family, if others may have it too.
    family: Option<Family>,
    /// Kept as long as the driver may look at it.
    content: Content,
    /// What clients can change in it. `None`: it cannot be told.
    variables: Variables,
    /// The options of its load, and the logs they lead to: a library is compiled when it is first used, and nothing
    /// says that the driver has forgotten them by then.
    _options: Box<JitOptions>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// One image has it for itself.
    closed: bool,
    functions: HashMap<Key, Use>,
    /// The driver's functions that were asked for: whoever asks again waits for nothing.
    found: HashMap<Key, CUfunction>,
    /// Devices whose functions were all asked for.
    looked_ahead: HashSet<Ordinal>,
    /// Images that have it. Each pays for it.
    payers: usize,
    /// What the last of them paid, until the driver has unloaded it, or it is kept for others.
    owed: Option<Charge>,
    /// It is counted as one that was kept for others, until the driver has unloaded it.
    counted: Option<Counted>,
    /// What its variables held when it was loaded, by device; `None` where that is not known.
    before: Before,
    /// Something of it was changed that cannot be put back.
    altered: bool,
    /// All that its last client had in flight is over.
    drained: bool,
}

/// How a function of an instance is used.
#[derive(Debug, Default)]
struct Use {
    /// Images.
    by: HashSet<u64>,
    set: Attributes,
    /// What was there before it was set.
    usual: Attributes,
}

impl Instance {
    fn new(
        store: &ImageStore,
        (raw, device): (Raw, Ordinal),
        family: Option<Family>,
        content: &Content,
        options: JitOptions,
    ) -> Arc<Instance> {
        store.families.count(side::entered());
        let variables = store.variables_of(content.hash(), content);
        let instance = Arc::new(Instance {
            raw,
            device,
            side: side::entered(),
            family,
            content: content.clone(),
            variables,
            _options: Box::new(options),
            state: Mutex::default(),
        });
        if let Raw::Module(_) = raw {
            instance.note_loaded(store, device);
        }
        instance
    }

    /// The driver has loaded it on a device just now, or had done so before it was said here.
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

    /// Has its variables hold again what they held at first, for the next client; whether nothing of the last one is left
    /// in it. Nobody has it.
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

    /// Whether what its clients have left in it can be undone.
    pub fn may_be_renewed(&self) -> bool {
        self.state.lock().may_be_renewed()
    }

    /// What its variables on a device held at first, where that is known.
    fn as_loaded(&self, device: Ordinal) -> Option<Arc<AsLoaded>> {
        self.state.lock().before.get(&device)?.clone()
    }

    /// Something of it is changed that cannot be put back.
    pub fn note_altered(&self) {
        self.state.lock().altered = true;
    }

    /// Clients that come may have it with those that do.
    pub fn is_open(&self) -> bool {
        !self.state.lock().closed
    }

    /// From now on it is one client's own.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Of which family, if others may have it.
    pub fn family(&self) -> Option<&Family> {
        self.family.as_ref()
    }

    /// What it was loaded from.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// One of its functions, to ask about it.
    ///
    /// # Errors
    /// The driver's.
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

    /// Whether the driver has loaded it: a library when something of it was used.
    fn is_loaded(&self) -> bool {
        matches!(self.raw, Raw::Module(_)) || !self.state.lock().found.is_empty()
    }

    /// Has the driver load a library of which nothing was asked for yet, if it may.
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
            // One that cannot be had fails when it is asked for.
            let _ = self.find(store, (found, before), &key);
        }
    }

    /// Asks for its functions, as long as it may.
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
            // One that cannot be had fails when it is asked for.
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

    /// The names of its kernels. They live as long as it.
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
        // SAFETY: the driver's names are NUL-ended and live as long as what they are names in.
        Ok(names.map(|name| unsafe { CStr::from_ptr(name) }).collect())
    }

    /// Has an image use a function with these attributes, if nobody else uses it with others.
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

    /// An image has it, and pays for it.
    fn join(&self) {
        let mut state = self.state.lock();
        state.payers += 1;
        state.drained = false;
        (state.owed, state.counted) = (None, None);
    }

    /// An image has it no longer; what that one paid for it, and whether nothing of it is in flight.
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

    /// It is kept for others: nobody pays for it any more.
    pub fn forgive(&self) {
        let mut state = self.state.lock();
        (state.owed, state.counted) = (None, None);
    }

    /// It is not kept any longer, if nobody has it.
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

    /// Unloads it.
    pub fn end(self, store: &ImageStore) {
        side::enter(self.side);
        let _ = store.gpu.devices[self.device].make_current(&store.gpu.driver);
        let ended = match self.raw {
            Raw::Module(module) => store.gpu.driver.module_unload(module),
            Raw::Library(library) => store.gpu.driver.library_unload(library),
        };
        if let Err(status) = ended {
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

/// What an image has of one function.
#[derive(Debug, Default)]
struct Chosen {
    /// Set for the kernel, and for the function, which counts.
    of_kernel: Attributes,
    of_function: Attributes,
    /// The instance, once the function was used.
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

/// The instance that an image takes a function from.
enum Picked {
    /// Of its own ones, by number.
    Own(usize),
    /// Of other clients.
    Others(Arc<Instance>),
}

/// A module or library of a session.
#[derive(Debug)]
pub struct Image {
    /// Unique in the life of the server.
    id: u64,
    /// Where its functions are. Variables are looked for in the first.
    instances: Vec<Arc<Instance>>,
    /// Of which family; `None` when it has an instance for itself.
    family: Option<Family>,
    /// Attributes go through [`Image::set`]: it is, or was, of a family.
    tracked: bool,
    content: Content,
    chosen: HashMap<Key, Chosen>,
    /// Server's ordinal; of no meaning for a library.
    pub device: Ordinal,
    /// Its kernels print.
    pub prints: bool,
    /// What its instances take on its device; it passes to each of them when the image is left.
    charge: Option<Charge>,
    /// What each takes, bytes.
    each: u64,
    /// Nobody keeps what is left of it.
    retired: bool,
    /// Nothing that the session had in flight is left.
    drained: bool,
}

static NEXT_IMAGE: AtomicU64 = AtomicU64::new(1);

/// Gives up a hold of an instance; the last one to do so leaves it to [`crate::engine::images::residents`]. Nothing else may drop one.
pub fn let_go(store: &ImageStore, instance: Arc<Instance>) {
    if let Some(last) = Arc::into_inner(instance) {
        store.bury(Unloading::Left(last));
    }
}

impl Image {
    /// Loads an image for a session, or finds it loaded. `family` is `None` for what must not be store. Gives the status
    /// of the load with the image or without.
    pub fn load(
        store: &ImageStore,
        handle: u64,
        (content, device, prints): (Content, Ordinal, bool),
        (family, offered): (Option<Family>, Option<Arc<Instance>>),
        mut options: JitOptions,
    ) -> (Result<Image, CUresult>, Vec<u8>) {
        let family = family.filter(|_| !prints);
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
                let (status, raw) = store.load(Handle(handle).kind(), &content, &mut options);
                let said = options.outcome(0);
                if let Err(status) = status {
                    return (Err(status), said);
                }
                let instance =
                    Instance::new(store, (raw, device), family.clone(), &content, options);
                store.families.add(&instance);
                (instance, said)
            }
        };
        let image = Image {
            id: NEXT_IMAGE.fetch_add(1, Ordering::Relaxed),
            instances: vec![instance],
            tracked: family.is_some(),
            family,
            content,
            chosen: HashMap::new(),
            device,
            prints,
            charge: None,
            each: 0,
            retired: false,
            drained: false,
        };
        image.instances[0].join();
        (Ok(image), said)
    }

    /// What it takes on its device was counted.
    pub fn pay(&mut self, charge: Charge) {
        self.each = charge.bytes();
        self.charge = Some(charge);
    }

    /// The client has given it back.
    pub fn leave_charge(&mut self) {
        if let Some(charge) = &mut self.charge {
            charge.leave();
        }
    }

    /// Counts one instance more than it has.
    fn pay_for_another(&mut self) -> Result<(), CUresult> {
        let each = self.each;
        let charge = self.charge.as_mut();
        charge.map_or(Ok(()), |charge| charge.resize(charge.bytes() + each))
    }

    /// What it pays for one instance.
    fn part_of_charge(&mut self) -> Option<Charge> {
        let each = self.each;
        self.charge.as_mut().map(|charge| charge.split(each))
    }

    /// Where it is loaded.
    pub fn side(&self) -> Side {
        self.instances[0].side
    }

    /// All that its session had in flight is over.
    pub fn note_drained(&mut self) {
        self.drained = true;
    }

    /// The driver has loaded what names are looked for in, on a device.
    pub fn note_loaded(&self, store: &ImageStore, device: Ordinal) {
        self.instances[0].note_loaded(store, device);
    }

    /// Its variables on a device, which are this session's alone, as they were at first; `None` where that is not known.
    pub fn variables(&self, device: Ordinal) -> Option<Arc<AsLoaded>> {
        // One of several that others may have too would not say which has the variables.
        let is_one = self.family.is_none() || self.instances.len() == 1;
        self.instances[0].as_loaded(device).filter(|_| is_one)
    }

    /// First address and bytes of each variable that is known of it.
    pub fn places(&self) -> Vec<(u64, u64)> {
        let state = self.instances[0].state.lock();
        let known = state.before.values().flatten();
        known.flat_map(|variables| variables.places()).collect()
    }

    /// The session changes something of it that cannot be put back.
    pub fn note_altered(&self) {
        self.instances[0].note_altered();
    }

    /// Whether a client finds it as new wherever it is loaded, as far as can be told without looking at the content: of one
    /// that is loaded, kernels may have changed variables.
    pub fn may_move(&self, store: &ImageStore) -> bool {
        let known = self.family.as_ref();
        known.is_some_and(|family| !self.is_loaded() || store.families.may_keep_nothing(family))
    }

    /// Whether kernels that have run find it as they have left it wherever it is loaded, and what they have left in memory is
    /// good there too. Takes time.
    pub fn is_as_new(&self, store: &ImageStore) -> bool {
        let bytes = &self.content[..self.content.len() - 1];
        !self.is_loaded()
            || store
                .gpu
                .devices
                .iter()
                .all(|device| cubin::takes_no_addresses(bytes, device.capability))
    }

    /// What it was loaded from.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The driver's object to ask about names.
    pub fn raw(&self) -> Raw {
        self.instances[0].raw
    }

    /// Whether attributes of its functions are set by [`Image::set`], and functions got by [`Image::take`].
    pub fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Whether other clients may have its instances too.
    pub fn may_be_shared(&self) -> bool {
        self.family.is_some()
    }

    /// Whether others have, or had, what it has: to be by itself it has to be loaded once more.
    pub fn is_with_others(&self) -> bool {
        self.family.is_some()
            && !matches!(&self.instances[..], [only] if Arc::strong_count(only) == 1)
    }

    /// A function to ask about, before it is used.
    pub fn look(&self, store: &ImageStore, key: &Key) -> Result<CUfunction, CUresult> {
        self.of(key).function(store, key)
    }

    /// Whether a function was asked for before, so that nobody waits when it is asked for again.
    pub fn knows(&self, key: &Key) -> bool {
        self.of(key).knows(key)
    }

    /// Whether the driver has loaded what names are looked for in.
    pub fn is_loaded(&self) -> bool {
        self.instances[0].is_loaded()
    }

    /// Has the driver load a library of which nothing was asked for yet, if it may.
    pub fn load_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        self.instances[0].load_ahead(store, device, may);
    }

    /// Asks for its functions, as long as it may.
    pub fn look_ahead(&self, store: &ImageStore, device: Ordinal, may: &dyn Fn() -> bool) {
        self.instances[0].look_ahead(store, device, may);
    }

    /// The names of its kernels.
    ///
    /// # Errors
    /// The driver's.
    pub fn names(&self, store: &ImageStore) -> Result<Vec<&CStr>, CUresult> {
        self.instances[0].names(store)
    }

    /// Where a function is.
    fn of(&self, key: &Key) -> &Instance {
        let at = self.chosen.get(key).and_then(|chosen| chosen.instance);
        &self.instances[at.unwrap_or(0)]
    }

    /// Puts what the session set, or what is usual, in the place of what others have set.
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

    /// The instance that serves a function with these attributes, if one does: the one that does so already and the image's
    /// others come before those of other clients, which only images have whose kernels keep nothing. With `known`, only one
    /// that was asked for the function before: the driver waits for nothing then.
    fn pick(
        &self,
        store: &ImageStore,
        key: &Key,
        wanted: &Attributes,
        known: bool,
    ) -> Option<Picked> {
        let fits = |one: &Instance| (!known || one.knows(key)) && one.suits(self.id, key, wanted);
        // One that was separated has its variables in the first; the others are there for what is in flight.
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

    /// The function as the session uses it from now on. It is asked for, or loaded once more, where [`Image::loads_to_take`]
    /// says so.
    ///
    /// # Errors
    /// The driver's.
    pub fn take(&mut self, store: &ImageStore, key: &Key) -> Result<CUfunction, CUresult> {
        let wanted = self.chosen.entry(key.clone()).or_default().wanted();
        for known in [true, false] {
            let picked = self.pick(store, key, &wanted, known);
            // Another client may have come before.
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

    /// Whether [`Image::take`], or [`Image::set`] of an attribute, of the kernel or of the function, has the driver load
    /// something, or asks for a function that nobody has asked for: others wait for that too.
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

    /// Has one instance more, for which it pays as for the first.
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
        let options = self
            .family
            .as_ref()
            .map_or(&[][..], |family| &family.options);
        let count = options.first().copied().unwrap_or(0);
        let mut options = JitOptions::read(options.get(1..).unwrap_or(&[]), count.into())
            .map_or_else(|_| JitOptions::default(), |(options, _)| options);
        let (status, raw) = store.load(Some(kind), &self.content, &mut options);
        status?;
        Ok(Instance::new(
            store,
            (raw, self.device),
            family,
            &self.content,
            options,
        ))
    }

    /// Sets an attribute for this session alone; gives the function, which may be another one now.
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

    /// What the session set for a kernel.
    pub fn of_kernel(&self, key: &Key, attribute: CUfunction_attribute) -> Option<i32> {
        self.chosen.get(key)?.of_kernel.get(&attribute).copied()
    }

    /// Gives the image an instance of its own, where its variables are; says whether functions are others now.
    pub fn separate(&mut self, store: &ImageStore) -> Result<bool, CUresult> {
        let Some(family) = &self.family else {
            return Ok(false);
        };
        store.families.note_asked(family);
        if let [only] = &self.instances[..] {
            let mut state = only.state.lock();
            // Whoever is about to have it too holds it already.
            if Arc::strong_count(only) == 1 {
                state.closed = true;
                drop(state);
                self.family = None;
                return Ok(false);
            }
        }
        let own = self.load_another(store, self.family.clone())?;
        own.close();
        for other in &self.instances {
            other.leave(self.id, |_| true);
        }
        // What is in flight, and graphs, still use the others.
        self.instances.insert(0, own);
        self.family = None;
        let keys: Vec<Key> = self.chosen.keys().cloned().collect();
        for key in keys {
            self.chosen.entry(key.clone()).or_default().instance = None;
            self.take(store, &key)?;
        }
        Ok(true)
    }

    /// What it would be on the side that the calling thread works on.
    ///
    /// # Errors
    /// The driver's.
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

    /// Takes this instance, which is on another side, in the place of those it has, none of whose functions it uses. The
    /// side of these is entered.
    pub fn move_to(&mut self, store: &ImageStore, to: Side, instance: Arc<Instance>) {
        instance.join();
        for (n, old) in std::mem::replace(&mut self.instances, vec![instance])
            .into_iter()
            .enumerate()
        {
            // It goes on to pay for one.
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

    /// The session's context on a device is over, and what was set for functions there.
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

    /// Ends the session's use of what others have too; gives the image back if it has anything besides.
    pub fn leave_shared(mut self, store: &ImageStore) -> Option<Image> {
        let others_have = |instance: &mut Arc<Instance>| Arc::strong_count(instance) > 1;
        let left: Vec<_> = self.instances.extract_if(.., others_have).collect();
        for instance in left {
            instance.part(self.id, self.part_of_charge(), false);
            // The others may have left meanwhile.
            let_go(store, instance);
        }
        (!self.instances.is_empty()).then_some(self)
    }

    /// Leaves what nobody else has to those who come; gives the image back if something is to be unloaded.
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

    /// Ends the session's use; unloads what nobody else has.
    pub fn end(self, store: &ImageStore) {
        for instance in self.instances {
            instance.leave(self.id, |_| true);
            if let Some(last) = Arc::into_inner(instance) {
                last.end(store);
            }
        }
    }
}
