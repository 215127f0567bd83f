//! Builds, lists and drops the templates of the node's handlers.

use super::Node;
use crate::config::Handler;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::template::{LentUser, Retry, TemplateKey, TemplateState, Templates};
use nacelle_base::machine::EngineKind;
use nacelle_base::{Chain, random};
use std::sync::Arc;

impl Node {
    /// Builds the templates of all handlers, and later those that pods want, for as long as the daemon serves.
    pub(crate) async fn build_templates(&self) {
        let services = &self.services;
        for (name, handler) in self.kvm_handlers() {
            if let Err(error) = services.templates.want_for(handler, Retry::WhenDue).await {
                tracing::warn!(handler = name, "cannot build a template, so pods boot: {}", Chain(&error));
            }
        }
        services.templates.build_wanted(&services.config, &*services.pods, || self.lend_user()).await;
    }

    /// Returns the templates.
    pub(crate) fn templates(&self) -> &Templates {
        &self.services.templates
    }

    /// Requests the templates of all handlers, or of one, and waits until they are built. Returns their keys and states.
    pub(crate) async fn build_templates_now(
        &self,
        only: Option<&str>,
    ) -> Result<Vec<(TemplateKey, Option<TemplateState>)>, LifecycleError> {
        let mut wanted = Vec::new();
        for (_, handler) in self.kvm_handlers().filter(|(name, _)| only.is_none_or(|only| only == *name)) {
            let template = self.templates().want_for(handler, Retry::Now).await;
            wanted.extend(template.map_err(at("find the template of the handler"))?);
        }
        let mut built = Vec::new();
        for key in wanted {
            let state = self.templates().wait_for(&key).await;
            built.push((key, state));
        }
        Ok(built)
    }

    /// Returns the handlers whose VMs run on engine `kvm`.
    fn kvm_handlers(&self) -> impl Iterator<Item = (&str, &Handler)> {
        let services = &self.services;
        let handlers = services.config.handlers.iter().map(|(name, handler)| (name.as_str(), handler));
        handlers.filter(|(_, handler)| handler.engine.or(services.engine.fitting) == EngineKind::Kvm)
    }

    /// Lends one of the users of pod processes; `None` if these are root.
    fn lend_user(&self) -> Result<Option<LentUser>, LifecycleError> {
        let mut seed = [0; 4];
        // Any number will do.
        let _ = random::fill(&mut seed);
        let user = self.table.rows().users.assign(u32::from_ne_bytes(seed))?;
        let table = Arc::clone(&self.table);
        Ok(user.map(|id| LentUser::new(id, move |id| table.rows().users.release(Some(id)))))
    }
}
