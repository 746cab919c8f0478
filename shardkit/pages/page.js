// Draws each figure in its place; Vega's own scripts are in the element above.
const specs = JSON.parse(document.getElementById("specs").textContent);
const drawings = Object.entries(specs).map(async ([name, spec]) => {
  const place = document.getElementById(`plot-${name}`);
  const title = document.getElementById(`title-${name}`).textContent;
  const { view } = await window.vegaEmbed(place, spec, { actions: false, renderer: "svg", ast: true });
  const svg = place.querySelector("svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}. The numbers are in the tables below.`);
  return view;
});
// What waits for the page to be whole (a test, a printer) looks here.
Promise.all(drawings).then(
  () => { document.documentElement.dataset.drawn = "yes"; },
  (error) => { document.documentElement.dataset.drawn = "failed"; console.error(error); },
);
