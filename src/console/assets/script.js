// Refreshes parts of a page while it is visible, and shows events as they come. Pages work without it.
"use strict";

(() => {
  const REFRESH_MS = 2000;
  const EVENT_ROWS_MAX = 200;

  const say = (text) => {
    const status = document.querySelector("[data-status]");
    if (status && status.textContent !== text) status.textContent = text;
  };

  // The positions of scrolled tables survive a refresh.
  const replace = (part, text) => {
    const positions = [...part.querySelectorAll(".scroll")].map((table) => [table.scrollLeft, table.scrollTop]);
    const focused = [...part.querySelectorAll("a, .scroll")].indexOf(document.activeElement);
    part.innerHTML = text;
    [...part.querySelectorAll(".scroll")].forEach((table, at) => {
      if (positions[at]) [table.scrollLeft, table.scrollTop] = positions[at];
    });
    if (focused >= 0) {
      const target = [...part.querySelectorAll("a, .scroll")][focused];
      if (target) target.focus({ preventScroll: true });
    }
  };

  const pauseButton = (changed) => {
    const button = document.querySelector("[data-pause]");
    let paused = false;
    if (button) {
      button.addEventListener("click", () => {
        paused = !paused;
        button.textContent = paused ? "Continue" : "Pause";
        changed(paused);
      });
    }
    return () => paused;
  };

  const live = (part) => {
    const isPaused = pauseButton((paused) => say(paused ? "Paused" : "Live"));
    const refresh = async () => {
      if (document.hidden || isPaused()) return true;
      try {
        const response = await fetch(part.dataset.live, { credentials: "same-origin" });
        if (response.status === 401) {
          location.reload();
          return false;
        }
        replace(part, await response.text());
        say("Live");
      } catch (error) {
        say("The page does not answer.");
      }
      return !(part.dataset.until && part.querySelector("[data-complete]"));
    };
    const loop = async () => {
      if (await refresh()) setTimeout(loop, REFRESH_MS);
    };
    setTimeout(loop, REFRESH_MS / 2);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) refresh();
    });
  };

  const events = (part) => {
    const rows = part.querySelector("tbody");
    let source = null;
    const open = () => {
      source = new EventSource(part.dataset.events);
      source.addEventListener("open", () => say("Waiting for events"));
      source.addEventListener("rows", (message) => {
        rows.insertAdjacentHTML("afterbegin", message.data);
        while (rows.rows.length > EVENT_ROWS_MAX) rows.deleteRow(-1);
        say("Receiving events");
      });
      source.addEventListener("failed", (message) => {
        source.close();
        say("The watch has ended: " + new DOMParser().parseFromString(message.data, "text/html").body.textContent);
      });
      source.addEventListener("error", () => {
        say(source.readyState === EventSource.CLOSED ? "Events cannot be read. Load the page again." : "Connecting");
      });
    };
    pauseButton((paused) => {
      if (paused) {
        source.close();
        say("Paused");
      } else {
        open();
      }
    });
    open();
    window.addEventListener("pagehide", () => source.close());
  };

  const part = document.querySelector("[data-live]");
  if (part) live(part);
  const stream = document.querySelector("[data-events]");
  if (stream) events(stream);
})();
