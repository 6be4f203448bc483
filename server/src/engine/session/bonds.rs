//! Bonds: the reasons why a session cannot leave its present context, for each destination, and how long they last.

use crate::engine::images::ImageStore;
use crate::engine::session::Session;
use crate::engine::session::flow::Flow;
use crate::engine::session::inbox::Inbox;
use crate::engine::session::lasting::Lasting;
use crate::engine::session::objects::Objects;
use mpsshim_api::cuda::CU_EVENT_DISABLE_TIMING;
use mpsshim_model::bonds::Bonds;

/// Destination at which a session continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Another process, which restores everything from the session's description.
    NextServer,
    /// Another context of this process ([`crate::engine::base::side`]): memory keeps its addresses; streams, events and
    /// images are made again from the live ones.
    Annex,
}

/// Bonds that keep a session from the next server until it is at rest: [`Bonds::UNTIL_SAVED`], and printed text, which has
/// been collected by then.
pub const UNTIL_AT_REST: Bonds = Bonds(Bonds::UNTIL_SAVED.0 | Bonds::PRINTS.0);

/// Most streams and events of a session that moves to an annex: making them again delays the sessions that work there.
const MOST_STREAMS: usize = 64;
const MOST_EVENTS: usize = 1024;

fn when(bond: Bonds, condition: bool) -> Bonds {
    Bonds::default().with(bond, condition)
}

impl Session {
    /// All bonds that keep the session from a destination.
    pub fn bonds(&self, images: &ImageStore, to: Destination) -> Bonds {
        let parts = [
            self.objects.bonds(images, to),
            self.lasting.bonds(images, to),
            self.flow.bonds(to),
            self.inbox.bonds(to),
        ];
        parts
            .into_iter()
            .fold(Bonds::default(), |all, some| all.with(some, true))
    }
}

impl Objects {
    /// Bonds of the session's objects. The pattern names all fields, so that a new kind of object has to state where it
    /// can be made again.
    fn bonds(&self, store: &ImageStore, to: Destination) -> Bonds {
        use Destination::{Annex, NextServer};
        let Objects {
            streams,
            retired,
            events,
            images,
            libraries,
            functions: _,
            globals,
            links,
            places,
            places_of_contexts,
            greens,
            resources,
            grants: _,
            evicted: _,
            releasing: _,
            leaving: _,
            sharing: _,
            peers,
            helpers,
            files: _,
            host: _,
            host_begun: _,
            host_spare: _,
            virtual_memory: _,
            pools,
            arrays,
            mipmaps,
            bound_arrays,
            array_memory: _,
            textures,
            texture_references,
            surface_references,
            graphs,
            limits: _,
        } = self;
        let references = texture_references.len() + surface_references.len() > 0;
        let both = when(Bonds::TEXTURES, references);
        match to {
            NextServer => both
                .with(graphs.bonds(), true)
                .with(pools.bonds(), true)
                .with(Bonds::PARTITIONS, resources.has_many_ended())
                .with(Bonds::LINKERS, links.iter().any(|link| !link.fetched)),
            Annex => {
                let mut loaded = images.iter().chain(libraries.iter());
                let mut works = streams.iter().chain(retired);
                let parted = greens.len() > 0 || !places_of_contexts.is_empty();
                let in_parts = places.iter().any(Option::is_some);
                // A single event that is recorded again is still a valid start time; with two, the interval between them
                // would be lost.
                let is_timed = |flags: u32| flags & CU_EVENT_DISABLE_TIMING == 0;
                let timed = events
                    .iter()
                    .filter(|one| one.recorded && is_timed(one.flags));
                let lost = timed.count() > 1
                    || events.iter().any(|event| event.time.is_of_another_server());
                let arrays = arrays.len() + mipmaps.len() + bound_arrays.len() > 0;
                both.with(Bonds::ARRAYS, arrays)
                    .with(Bonds::TEXTURES, !textures.is_empty())
                    .with(Bonds::IMAGES, loaded.any(|image| !image.may_move(store)))
                    .with(Bonds::VARIABLES, !globals.is_empty())
                    .with(Bonds::GRAPHS, !graphs.is_untouched())
                    .with(Bonds::PARTITIONS, parted || in_parts)
                    .with(Bonds::PARTITIONS, works.any(|stream| stream.is_special()))
                    .with(Bonds::PEERS, !peers.is_empty() || !helpers.is_empty())
                    .with(Bonds::TIMES, lost)
                    .with(
                        Bonds::SHARED,
                        events.iter().any(|event| event.shared.is_some()),
                    )
                    .with(Bonds::MANY, streams.len() > MOST_STREAMS)
                    .with(Bonds::MANY, events.len() > MOST_EVENTS)
            }
        }
    }
}

impl Lasting {
    /// Bonds of state that is missing in the description. An annex does not read the description.
    fn bonds(&self, images: &ImageStore, to: Destination) -> Bonds {
        if to == Destination::Annex {
            return Bonds::default();
        }
        let keeper = images.gpu.keeping.keeper();
        let keeps = keeper.is_some_and(|keeper| keeper.is_there());
        let unkept = self.unkept_memory || !self.unkept_images.is_empty();
        when(Bonds::UNKEPT, !keeps || !self.kept || unkept)
            .with(self.saved.bonds(), true)
            .with(self.times.bonds(), true)
            .with(Bonds::IMAGES, self.binding_images)
            .with(Bonds::REGISTERED, !self.unkept_files.is_empty())
            .with(Bonds::ARRAYS, !self.unkept_arrays.is_empty())
            .with(Bonds::TEXTURES, !self.unkept_textures.is_empty())
            .with(Bonds::MANY, self.undescribed || self.far_streams)
    }
}

impl Flow {
    /// Bonds of turns that the session holds.
    fn bonds(&self, to: Destination) -> Bonds {
        let has_turn = to == Destination::Annex && (self.has_graph_turn || self.loops.has);
        when(Bonds::PRINTS, self.printed.holds).with(Bonds::GRAPHS, has_turn)
    }
}

impl Inbox {
    /// Bond of deferred messages: they are executed before a session comes to rest, but an annex does not take them
    /// over.
    fn bonds(&self, to: Destination) -> Bonds {
        when(Bonds::MANY, to == Destination::Annex && self.held.any())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::moment::Moment;
    use crate::engine::scheduling::moving::may_move;
    use crate::engine::testing::Fixture;

    fn bonds(test: &Fixture, to: Destination) -> Bonds {
        test.session.bonds(&test.shared.images, to)
    }

    #[test]
    fn a_new_session_is_bound_by_the_missing_keeper_alone() {
        let test = Fixture::new(&[]);
        assert_eq!(bonds(&test, Destination::NextServer), Bonds::UNKEPT);
        assert_eq!(bonds(&test, Destination::Annex), Bonds::default());
    }

    #[test]
    fn a_turn_binds_to_the_context() {
        let mut test = Fixture::new(&[]);
        test.session.flow.has_graph_turn = true;
        assert_eq!(bonds(&test, Destination::NextServer), Bonds::UNKEPT);
        assert_eq!(bonds(&test, Destination::Annex), Bonds::GRAPHS);
    }

    #[test]
    fn printing_binds_everywhere_until_the_text_is_told() {
        let mut test = Fixture::new(&[]);
        test.session.flow.printed.holds = true;
        assert_eq!(bonds(&test, Destination::Annex), Bonds::PRINTS);
        let next = bonds(&test, Destination::NextServer);
        assert_eq!(next, Bonds::UNKEPT.with(Bonds::PRINTS, true));
        assert_eq!(next.0 & !UNTIL_AT_REST.0, Bonds::UNKEPT.0);
        assert_ne!(next.0 & !Bonds::UNTIL_SAVED.0, Bonds::UNKEPT.0);
    }

    #[test]
    fn a_session_with_nothing_in_flight_may_move() {
        let mut test = Fixture::new(&[]);
        test.session.flow.moment = Some(Moment::endless());
        let shared = test.shared.clone();
        assert!(may_move(&mut test.session, &shared));
        test.session.flow.has_graph_turn = true;
        assert!(!may_move(&mut test.session, &shared));
    }
}
