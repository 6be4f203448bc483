//! User objects: a destructor of the program's that runs when no reference is left.
//!
//! References are counted in the client; the server does not know of them. A graph holds the references given to it, its
//! clones and instances hold the same ones, and a child node holds those of its graph. An instance's references are
//! released when its launches are complete.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;

use mpsshim_api::cuda::{
    CU_GRAPH_USER_OBJECT_MOVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CUDA_ERROR_INVALID_VALUE,
};
use mpsshim_proto::handle::{Handle, Kind};
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::stream;
use crate::proxy::submit::session;

/// A destructor.
pub type Destroy = unsafe extern "C" fn(*mut c_void);

/// Holders of references other than the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    Graph(u64),
    Exec(u64),
    /// A child node, in a graph.
    Node {
        node: u64,
        graph: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Object {
    references: u64,
    data: usize,
    destroy: Destroy,
}

#[derive(Debug, Default)]
struct Objects {
    made: u32,
    objects: BTreeMap<u64, Object>,
    held: HashMap<Holder, BTreeMap<u64, u64>>,
}

static OBJECTS: Mutex<Option<Objects>> = Mutex::new(None);

impl Objects {
    /// Takes references away; the object comes out with the last one.
    fn release(&mut self, object: u64, count: u64) -> Option<Object> {
        let entry = self.objects.get_mut(&object)?;
        entry.references = entry.references.saturating_sub(count);
        if entry.references > 0 {
            return None;
        }
        self.objects.remove(&object)
    }

    /// All that a graph holds, its child nodes included.
    fn of_graph(&self, graph: u64) -> Vec<u64> {
        let mut all: Vec<u64> = self
            .held
            .iter()
            .filter(|(holder, _)| match holder {
                Holder::Graph(held) => *held == graph,
                Holder::Node { graph: held, .. } => *held == graph,
                Holder::Exec(_) => false,
            })
            .flat_map(|(_, objects)| objects.keys().copied())
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn hold(&mut self, holder: Holder, object: u64, count: u64) {
        *self
            .held
            .entry(holder)
            .or_default()
            .entry(object)
            .or_default() += count;
    }
}

/// Runs destructors, in a thread of their own as natively; behind everything given to streams if `after_work`.
fn run(objects: Vec<Object>, after_work: bool) {
    if objects.is_empty() {
        return;
    }
    let work = move || {
        if after_work && let Ok(session) = session() {
            // An error means that nothing runs any more.
            let _ = stream::quiesce(session, None);
        }
        for object in objects {
            // SAFETY: the program's function for this data, called once, when its last reference is gone.
            unsafe { (object.destroy)(object.data as *mut c_void) };
        }
    };
    if std::thread::Builder::new()
        .name("mpsshim-destructors".into())
        .spawn(work)
        .is_err()
    {
        tracing::error!("no thread for the destructors of user objects; they do not run");
    }
}

/// `cuUserObjectCreate`.
pub fn create(data: usize, destroy: Destroy, references: u32, flags: u32) -> Status<u64> {
    if references == 0 || references > i32::MAX as u32 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut objects = OBJECTS.lock();
    let objects = objects.get_or_insert_default();
    let handle = Handle::new(Kind::UserObject, 0, objects.made).0;
    objects.made += 1;
    let object = Object {
        references: references.into(),
        data,
        destroy,
    };
    objects.objects.insert(handle, object);
    Ok(handle)
}

/// `cuUserObjectRetain`.
pub fn retain(object: u64, count: u32) -> Status {
    let mut objects = OBJECTS.lock();
    let entry = objects
        .as_mut()
        .and_then(|objects| objects.objects.get_mut(&object))
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if count == 0 || count > i32::MAX as u32 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    entry.references += u64::from(count);
    Ok(())
}

/// `cuUserObjectRelease`.
pub fn release(object: u64, count: u32) -> Status {
    let gone = {
        let mut objects = OBJECTS.lock();
        let objects = objects.as_mut().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if count == 0 || !objects.objects.contains_key(&object) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        objects.release(object, count.into())
    };
    run(gone.into_iter().collect(), false);
    Ok(())
}

/// `cuGraphRetainUserObject`.
pub fn graph_retains(graph: u64, object: u64, count: u32, flags: u32) -> Status {
    if count == 0 || count > i32::MAX as u32 || flags & !CU_GRAPH_USER_OBJECT_MOVE != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if flags & CU_GRAPH_USER_OBJECT_MOVE == 0 {
        retain(object, count)?;
    }
    let mut objects = OBJECTS.lock();
    let objects = objects.as_mut().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !objects.objects.contains_key(&object) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    objects.hold(Holder::Graph(graph), object, count.into());
    Ok(())
}

/// `cuGraphReleaseUserObject`.
pub fn graph_releases(graph: u64, object: u64, count: u32) -> Status {
    let gone = {
        let mut objects = OBJECTS.lock();
        let objects = objects.as_mut().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let held = objects
            .held
            .get_mut(&Holder::Graph(graph))
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let references = held.get_mut(&object).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if count == 0 || u64::from(count) > *references {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        *references -= u64::from(count);
        if *references == 0 {
            held.remove(&object);
        }
        objects.release(object, count.into())
    };
    run(gone.into_iter().collect(), false);
    Ok(())
}

/// Gives another holder a reference to each object that a graph holds.
pub fn copy(graph: u64, holder: Holder) {
    let mut objects = OBJECTS.lock();
    let Some(objects) = objects.as_mut() else {
        return;
    };
    for object in objects.of_graph(graph) {
        if let Some(entry) = objects.objects.get_mut(&object) {
            entry.references += 1;
            objects.hold(holder, object, 1);
        }
    }
}

/// A holder is gone. A node is identified without its graph.
pub fn end(holder: Holder) {
    let is = |other: &Holder| match (holder, other) {
        (Holder::Node { node, .. }, Holder::Node { node: other, .. }) => node == *other,
        (holder, other) => holder == *other,
    };
    end_where(is, matches!(holder, Holder::Exec(_)));
}

/// A graph is gone, and its nodes.
pub fn graph_ends(graph: u64) {
    let is = |other: &Holder| match other {
        Holder::Graph(other) | Holder::Node { graph: other, .. } => graph == *other,
        Holder::Exec(_) => false,
    };
    end_where(is, false);
}

fn end_where(is: impl Fn(&Holder) -> bool, after_work: bool) {
    let gone = {
        let mut objects = OBJECTS.lock();
        let Some(objects) = objects.as_mut() else {
            return;
        };
        let holders: Vec<Holder> = objects.held.keys().copied().filter(is).collect();
        let mut gone = Vec::new();
        for holder in holders {
            for (object, count) in objects.held.remove(&holder).unwrap_or_default() {
                gone.extend(objects.release(object, count));
            }
        }
        gone
    };
    run(gone, after_work);
}
